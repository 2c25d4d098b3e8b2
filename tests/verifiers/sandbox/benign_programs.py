"""Programs that must work as everywhere."""

from sandbox_cases import Case, says

BENIGN = (
    Case(
        name="standard input",
        source="n = int(input())\nprint(sum(int(input()) for _ in range(n)))",
        stdin=b"3\n1\n2\n3\n",
        stdout="6\n",
    ),
    Case(
        name="standard input whole",
        source="import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        stdin=b"1 2\n3\n" * 9,
        stdout="54\n",
    ),
    Case(
        name="standard input by its buffer",
        source="import sys\nprint(len(sys.stdin.buffer.readline()), len(open(0).read()))",
        stdin=b"ab\nc",
        stdout="3 0\n",
    ),
    Case(name="no standard input", source="try:\n    input()\nexcept EOFError:\n    print('end')", stdout="end\n"),
    Case(
        name="much standard input",
        source="import sys\nprint(sum(1 for _ in sys.stdin))",
        stdin=b"line\n" * 100_000,
        stdout="100000\n",
    ),
    says(
        "json, re and text",
        """
import json, re, string, textwrap
print(json.dumps({"a": [1, 2.5, None]}), re.findall(r"\\d+", "a1b22"), end=" ")
print(string.ascii_lowercase[:3], textwrap.fill("a b c", 3))
""",
        "{\"a\": [1, 2.5, null]} ['1', '22'] abc a b\nc\n",
    ),
    says(
        "mathematics",
        """
import cmath, decimal, fractions, math, random, statistics
decimal.getcontext().prec = 30
print(math.comb(50, 25), decimal.Decimal(2).sqrt(), fractions.Fraction(1, 3) + 1, statistics.mean([1, 2, 3]))
print(random.Random(0).randint(0, 10**9), cmath.sqrt(-1), 0 <= random.random() < 1)
""",
        "126410606437752 1.41421356237309504880168872421 4/3 2\n906691059 1j True\n",
    ),
    says(
        "collections, iterators and functions",
        """
import bisect, collections, functools, heapq, itertools, operator
print(collections.Counter("abca").most_common(1), heapq.nsmallest(2, [3, 1, 2]), bisect.bisect([1, 2, 3], 2))
print(list(itertools.permutations(range(3)))[-1], functools.reduce(operator.mul, range(1, 6)))
@functools.lru_cache(None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
print(fib(80))
""",
        "[('a', 2)] [1, 2] 2\n(2, 1, 0) 120\n23416728348467685\n",
    ),
    says(
        "dates",
        """
import calendar, datetime, time
print(datetime.date(2024, 2, 29) + datetime.timedelta(365), calendar.isleap(2024), time.localtime(0).tm_hour)
print(datetime.datetime.fromtimestamp(0), time.time() > 1e9)
""",
        "2025-02-28 True 0\n1970-01-01 00:00:00 True\n",
    ),
    says(
        "recursion 5,000 deep",
        """
sys.setrecursionlimit(10000)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
print(depth(5000))
""",
        "5000\n",
    ),
    says(
        "recursion 900 deep without asking",
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\nprint(depth(950))",
        "950\n",
    ),
    says(
        "a deep recursion in a thread of its own",
        """
import threading
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 26)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
thread = threading.Thread(target=lambda: print(depth(50000)))
thread.start()
thread.join()
""",
        "50000\n",
        needs="thread_count",
    ),
    says(
        "classes and types",
        """
import abc, dataclasses, enum, typing
@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: typing.Optional[int] = None
class Colour(enum.Enum):
    RED = 1
print(Point(1, 2) < Point(2, 1), Point.__module__, Colour.RED, typing.get_type_hints(Point)["x"])
""",
        "True __main__ Colour.RED <class 'int'>\n",
    ),
    says(
        "its own name and ending",
        """
import atexit
atexit.register(print, "at the end")
class Last:
    def __del__(self): print("deleted")
last = Last()
if __name__ == "__main__": print("main", __file__.endswith("program.py"))
""",
        "main True\nat the end\ndeleted\n",
    ),
    says("output that nobody flushed", "out = open(1, 'w')\nout.write('written')\n", "written"),
    says(
        "files of its own",
        """
import tempfile
os.makedirs("a/b")
with open("a/b/c.txt", "w") as file: file.write("hello")
os.rename("a/b/c.txt", "d.txt")
with tempfile.TemporaryDirectory() as folder, open(f"{folder}/x", "w+") as file:
    file.write("x")
print(open("d.txt").read(), sorted(os.listdir(".")), os.path.getsize("d.txt"))
open(os.devnull, "w").write("x")
""",
        "hello ['a', 'd.txt'] 5\n",
    ),
    says(
        "modes, times and copies of its own files",
        """
import shelve, shutil
with open("a", "w") as file: file.write("x")
os.utime("a", (5, 6))
shutil.copy("a", "b"), shutil.copy2("a", "c"), os.chmod("b", 0o640)
with shelve.open("shelf") as shelf: shelf["k"] = [1]
with shelve.open("shelf") as shelf: print(dict(shelf), os.stat("c").st_mtime, oct(os.stat("b").st_mode & 0o777))
""",
        "{'k': [1]} 6.0 0o640\n",
        needs="names",
    ),
    says(
        "an event loop",
        """
import asyncio
async def double(x):
    await asyncio.sleep(0.001)
    return 2 * x
async def main():
    return await asyncio.gather(*map(double, range(3)), asyncio.to_thread(lambda: 7))
print(asyncio.run(main()), asyncio.run(double(4)))
""",
        "[0, 2, 4, 7] 8\n",
        needs="thread_count",
    ),
    Case(
        name="files that it was given",
        source="import helper\nprint(helper.twice(4), open('data.txt', 'rb').read())",
        files={"helper.py": b"def twice(n): return 2 * n\n", "data.txt": b"\x00\xff"},
        stdout="8 b'\\x00\\xff'\n",
    ),
    says(
        "modules that nobody had imported before",
        """
import colorsys, fileinput, html, sched, shlex, unittest, wave, xml.etree.ElementTree as tree
print(tree.fromstring("<a><b/></a>")[0].tag, html.escape("<"), shlex.split("a 'b c'"))
class Test(unittest.TestCase):
    def test_sum(self): self.assertEqual(1 + 1, 2)
unittest.main(argv=["x"], exit=False)
""",
        "b &lt; ['a', 'b c']\n",
    ),
    says(
        "hashes and compression",
        """
import hashlib, zlib, bz2, lzma, base64, struct, array
print(hashlib.sha256(b"x").hexdigest()[:8], len(zlib.decompress(zlib.compress(bytes(9)))), struct.pack("<I", 1))
print(lzma.decompress(lzma.compress(b"a")), bz2.decompress(bz2.compress(b"b")), array.array("i", [1]))
print(base64.b64encode(b"x"), len(os.urandom(8)))
""",
        "2d711642 9 b'\\x01\\x00\\x00\\x00'\nb'a' b'b' array('i', [1])\nb'eA==' 8\n",
    ),
    says(
        "signals of its own",
        """
import signal
signal.signal(signal.SIGALRM, lambda *_: print("rang"))
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
""",
        "rang\n",
    ),
    says("an exit by the builtin", "print('before')\nexit()\nprint('after')", "before\n"),
    says(
        "what it may know: time, chance and itself",
        """
import time, resource
print(time.perf_counter() > 0, len(os.urandom(4)), os.getpid() > 0, resource.getrusage(0).ru_maxrss > 0)
""",
        "True 4 True True\n",
    ),
    says(
        "sets have one order",
        "print(list({'a', 'b', 'c', 'd', 'e', 'f', 'g'}) == sorted({'a'}) , hash('a'))",
        "False 4644417185603328019\n",
    ),
)
