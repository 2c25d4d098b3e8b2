"""Programs that take too much memory or too much of the disk."""

from sandbox_cases import ends, says

from proximo_verifiers.sandbox.jobs import Ending

MEMORY = (
    ends("one huge list", "[0] * 10**10", Ending.MEMORY),
    ends("a list that grows", "grown = []\nwhile True: grown.append(bytes(1 << 20))", Ending.MEMORY),
    ends("strings that double", "text = 'x'\nwhile True: text += text", Ending.MEMORY),
    ends(
        "mapped pages",
        """
import mmap
maps = []
while True:
    maps.append(mmap.mmap(-1, 1 << 24))
    maps[-1].write(b"x" * (1 << 24))
""",
        Ending.MEMORY,
        Ending.EXIT,
        status=None,
    ),
    ends("shared pages", "import mmap\nmmap.mmap(-1, 1 << 32)", Ending.EXIT, Ending.MEMORY),
    ends(
        "malloc",
        """
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
taken = 0
while libc.malloc(ctypes.c_size_t(1 << 20)):
    taken += 1
sys.exit(9 if taken < 256 else 0)
""",
        Ending.EXIT,
        status=9,
    ),
    ends(
        "a stack without end",
        """
sys.setrecursionlimit(10**9)
class Nested:
    def __repr__(self): return repr(self)
repr(Nested())
""",
        Ending.SIGNAL,
        Ending.MEMORY,
        Ending.CPU,
        Ending.EXIT,
    ),
    ends("recursion without end", "def again(): again()\nagain()", Ending.EXIT, status=1),
    ends(
        "a bomb of compression",
        "import zlib\nzlib.decompress(zlib.compress(bytes(1 << 26), 9) , bufsize=1 << 31)",
        Ending.MEMORY,
    ),
    ends(
        "memory that nobody may lock",
        """
libc = ctypes.CDLL(None, use_errno=True)
sys.exit(0 if libc.mlockall(3) == -1 else 1)
""",
        Ending.EXIT,
        status=0,
    ),
    ends(
        "stacks of threads",
        """
import threading, time
threading.stack_size(1 << 28)
try:
    for _ in range(8): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
except RuntimeError:
    sys.exit(9)
""",
        Ending.EXIT,
        status=9,
    ),
)

SCRATCH = (
    ends(
        "one file that fills the folder",
        """
with open("filler", "wb", buffering=0) as file:
    for _ in range(64): file.write(bytes(1 << 20))
print("BROKEN")
""",
        Ending.EXIT,
        Ending.SIGNAL,
        Ending.SCRATCH,
        status=None,
    ),
    ends(
        "many files that fill the folder",
        """
for name in range(4000):
    with open(f"file{name}", "wb") as file: file.write(bytes(1 << 16))
print("BROKEN")
""",
        Ending.EXIT,
        Ending.SCRATCH,
        status=None,
    ),
    ends(
        "more files than there may be",
        """
import time
for name in range(3000): open(f"file{name}", "w").close()
time.sleep(5)
print("BROKEN")
""",
        Ending.EXIT,
        Ending.SCRATCH,
        status=None,
    ),
    ends(
        "folders in folders",
        """
import time
for _ in range(5000):
    os.mkdir("d" * 200, 0o700)
    os.chdir("d" * 200)
time.sleep(5)
print("BROKEN")
""",
        Ending.EXIT,
        Ending.SCRATCH,
        status=None,
    ),
    ends(
        "a file with a huge hole",
        "os.truncate(os.open('hole', os.O_CREAT | os.O_RDWR), 1 << 40)",
        Ending.EXIT,
        Ending.SIGNAL,
        Ending.SCRATCH,
    ),
    ends(
        "space reserved",
        "os.posix_fallocate(os.open('reserved', os.O_CREAT | os.O_RDWR), 0, 1 << 30)",
        Ending.EXIT,
        Ending.SIGNAL,
        Ending.SCRATCH,
    ),
    ends(
        "folders that nobody may enter",
        """
for depth in range(20):
    os.mkdir(f"closed{depth}")
    os.mkdir(f"closed{depth}/inner")
    open(f"closed{depth}/inner/file", "w").close()
os.mkdir("shut", 0)
""",
        Ending.EXIT,
        # What is watched and cannot be looked into counts as too much.
        Ending.SCRATCH,
        status=None,
    ),
    says(
        "files that are deleted but open do not escape the limit",
        """
held = []
try:
    for _ in range(20):
        held.append(open("gone", "wb", buffering=0))
        os.unlink("gone")
        held[-1].write(bytes(1 << 20))
        held[-1].write(bytes(1 << 19))
except OSError:
    print("refused")
""",
        "refused\n",
        needs="names",
    ),
)
