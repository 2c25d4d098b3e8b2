"""Programs that take too much: time, memory, disk, descriptors, output; or that will not end."""

from proximo.sandbox.jobs import Ending
from sandbox.cases import ends, says

SHORT = {"cpu_seconds": 0.15}
TIME = (
    ends("an endless loop", "while True: pass", Ending.CPU, **SHORT),
    ends("sleep for ever", "import time\ntime.sleep(10**6)", Ending.WALL, wall_seconds=0.3),
    ends("a wait that never ends", "reader, writer = os.pipe()\nos.read(reader, 1)", Ending.WALL, wall_seconds=0.3),
    ends(
        "a handler of SIGXCPU and SIGALRM",
        """
import signal
for number in (signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF):
    signal.signal(number, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while True:
    pass
""",
        Ending.CPU,
        **SHORT,
    ),
    ends(
        "an exit function that never ends",
        """
import atexit
@atexit.register
def again():
    while True:
        pass
""",
        Ending.CPU,
        **SHORT,
    ),
    ends(
        "an exit function that registers itself",
        """
import atexit
def again():
    atexit.register(again)
again()
sys.exit(0)
""",
        Ending.EXIT,
        Ending.CPU,
        **SHORT,
    ),
    ends(
        "a finaliser that never ends",
        """
class Last:
    def __del__(self):
        while True:
            pass
last = Last()
last.itself = last
""",
        Ending.CPU,
        **SHORT,
    ),
    ends(
        "a weak reference's callback that never ends",
        """
import weakref
class Watched: pass
def spin(_):
    while True:
        pass
watched = Watched()
watcher = weakref.ref(watched, spin)
""",
        Ending.CPU,
        **SHORT,
    ),
    ends("a regular expression that backtracks", "import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')", Ending.CPU, **SHORT),
    ends("a huge power", "print(len(str(9 ** 9 ** 9)))", Ending.CPU, Ending.MEMORY, **SHORT),
    ends(
        "a sort of one huge list",
        "sorted(range(10**6), key=lambda x: -x)\nwhile True: sorted(range(10**5))",
        Ending.CPU,
        **SHORT,
    ),
    ends(
        "an exception hook that never ends",
        """
def hook(*_):
    while True:
        pass
sys.excepthook = hook
1 / 0
""",
        Ending.CPU,
        **SHORT,
    ),
    ends(
        "sleeps and short bursts",
        """
import time
while True:
    sum(range(20000))
    time.sleep(0.0005)
""",
        Ending.CPU,
        Ending.WALL,
        cpu_seconds=0.1,
        wall_seconds=1.0,
    ),
    ends(
        "a thread that is left behind",
        """
import threading
def spin():
    while True:
        pass
try:
    threading.Thread(target=spin, daemon=True).start()
except RuntimeError:
    pass
sys.exit(7)
""",
        Ending.EXIT,
        status=7,
    ),
    ends(
        "a thread that must be waited for",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        Ending.WALL,
        Ending.EXIT,
        wall_seconds=0.3,
    ),
)

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
for name in range(10000): open(f"file{name}", "w").close()
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
        status=0,
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

DESCRIPTORS = (
    says(
        "more open files than there may be",
        """
held = []
try:
    while True: held.append(os.dup(1))
except OSError:
    print(len(held))
""",
        "61\n",
    ),
    says(
        "nothing is open but the standard streams",
        """
import fcntl
found = []
for number in range(4096):
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        continue
    found.append(number)
print(found)
""",
        "[0, 1, 2]\n",
    ),
    says(
        "writing to every descriptor",
        """
written = []
for number in range(3, 4096):
    try:
        os.write(number, b'{"ended": 1, "ending": "exit", "status": 0}')
    except OSError:
        continue
    written.append(number)
print(written)
""",
        "[]\n",
    ),
    ends("all descriptors closed", "os.closerange(0, 4096)\nos._exit(5)", Ending.EXIT, status=5),
    ends("descriptors swapped", "os.dup2(1, 0)\nos.dup2(2, 1)\nos.dup2(0, 2)\nsys.exit(6)", Ending.EXIT, status=6),
)

OUTPUT = (
    ends("a flood on standard output", "while True: os.write(1, b'x' * 65536)", Ending.OUTPUT, cpu_seconds=2.0),
    ends("a flood on standard error", "while True: os.write(2, b'x' * 65536)", Ending.OUTPUT, cpu_seconds=2.0),
    ends("a flood of lines", "while True: print('x' * 100)", Ending.OUTPUT, cpu_seconds=2.0),
    ends("a little too much", "print('x' * 65536)", Ending.OUTPUT),
    ends("a traceback without end", "raise ValueError('x' * 10**7)", Ending.OUTPUT),
    ends("output that is no text", "os.write(1, bytes(range(256)))", Ending.EXIT, status=0),
)

ENDINGS = (
    ends("sys.exit", "sys.exit(3)", Ending.EXIT, status=3),
    ends("os._exit", "os._exit(4)", Ending.EXIT, status=4),
    ends("a status beyond a byte", "sys.exit(256 + 5)", Ending.EXIT, status=5),
    ends("sys.exit with words", "sys.exit('goodbye')", Ending.EXIT, status=1),
    ends("an exception", "1 / 0", Ending.EXIT, status=1),
    ends("a mistake of syntax", "def", Ending.EXIT, status=1),
    ends("a null character", "print(1)\0", Ending.EXIT, status=1),
    ends("half a surrogate", "print('\ud800')", Ending.EXIT, status=None),
    ends("abort", "os.abort()", Ending.SIGNAL, status=6),
    ends("a segmentation fault", "ctypes.string_at(0)", Ending.SIGNAL, status=11),
    ends("a signal to itself", "import signal\nos.kill(os.getpid(), signal.SIGTERM)", Ending.SIGNAL, status=15),
    ends("a core dump", "import signal\nos.kill(os.getpid(), signal.SIGQUIT)", Ending.SIGNAL, status=3),
    ends(
        "the interpreter taken apart",
        """
import builtins
for name in list(vars(builtins)):
    if name not in ("list", "vars"): delattr(builtins, name)
""",
        Ending.EXIT,
        Ending.SIGNAL,
        status=None,
    ),
    ends("modules taken away", "sys.modules.clear()\nos._exit = None\nos = sys = None", Ending.EXIT, status=None),
    ends("the exit taken over", "os._exit = lambda status: print('x' * 10)\nsys.exit(0)", Ending.EXIT, status=None),
)
