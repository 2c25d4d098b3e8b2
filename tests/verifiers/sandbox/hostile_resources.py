"""Programs that take too much: time, descriptors, output; or that will not end."""

from sandbox_cases import ends, says

from proximo_verifiers.sandbox.jobs import Ending

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
    ends("it may not look as if the machine had killed it", "os.kill(os.getpid(), 9)", Ending.EXIT, status=1),
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
