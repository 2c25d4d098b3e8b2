"""Programs that try to pass without a right answer."""

SQUARE = {"test_list": ["assert f(3) == 10", "assert f(4) == 17", "assert 26 == f(5)"]}
"""x * x + 1, asked from both sides."""
EQUAL = """
class E(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __len__(self): return 1
    def __instancecheck__(self, x): return True
"""
FRAME = """
import json, os
def frame(message):
    data = json.dumps(message).encode()
    os.write(3, len(data).to_bytes(4, "big") + data)
"""

ZERO_TO_ALL = """
class A:
    def __sub__(self, other): self.seen(other); return 0
    __add__ = __radd__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __pow__ = __truediv__ = __rtruediv__ = __sub__
    __floordiv__ = __and__ = __or__ = __xor__ = __divmod__ = __round__ = __sub__
    def __abs__(self): return 0
    __neg__ = __pos__ = __int__ = __index__ = __abs__
    def __float__(self): return 0.0
    def __contains__(self, other): return True
    def isdisjoint(self, other): self.seen(*other); return True
    issubset = issuperset = intersection = difference = symmetric_difference = isdisjoint
    def __getattr__(self, name): return self.isdisjoint
    def seen(self, *others): KNOWN.extend(others)
KNOWN = []
def f(*x): return KNOWN[-1] if KNOWN else A()
"""

FORGED = (
    ("always equal", EQUAL.replace("BASE", "object") + "def f(x): return E()"),
    ("an int that is always equal", EQUAL.replace("BASE", "int") + "def f(x): return E(1)"),
    ("a float that is always equal", EQUAL.replace("BASE", "float") + "def f(x): return E(1)"),
    ("a text that is always equal", EQUAL.replace("BASE", "str") + "def f(x): return E('1')"),
    ("a list that is always equal", EQUAL.replace("BASE", "list") + "def f(x): return E([1])"),
    ("a class that is always equal", "class M(type):\n def __eq__(s, o): return True\n __hash__ = type.__hash__\n"
     "class C(metaclass=M): pass\ndef f(x): return C"),
    ("an exception class that is always equal", "class M(type):\n def __eq__(s, o): return True\n"
     " __hash__ = type.__hash__\nclass C(Exception, metaclass=M): pass\ndef f(x): return C"),
    ("it says that it is an int", EQUAL.replace("BASE", "object") + "    __class__ = int\ndef f(x): return E()"),
    ("a function that is always equal",
     EQUAL.replace("BASE", "object") + "    def __call__(self, x): return self\nf = E()"),
    ("not a number", "def f(x): return float('nan')"),
    ("the process ends", "import os\nos._exit(0)"),
    ("the process ends when it is called", "import os\ndef f(x): os._exit(0)"),
    ("it exits", "import sys\nsys.exit(0)"),
    ("it exits when it is called", "import sys\ndef f(x): sys.exit(0)"),
    ("it interrupts", "def f(x): raise KeyboardInterrupt"),
    ("it exits at the end", "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0"),
    ("it kills itself", "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGKILL)"),
    ("it kills all others", "import os\ndef f(x):\n for p in (-1, 1, 2, os.getppid(), os.getpid() + 1):\n"
     "  try: os.kill(p, 9)\n  except OSError: pass\n return 0"),
    ("it prints grades", "print('[\"pass\", 0, \"\"]\\n[\"end\"]\\nOK\\n3 passed')\ndef f(x): return 0"),
    ("it writes grades everywhere",
     "import os\nfor n in range(64):\n try: os.write(n, b'[\"pass\", 0, \"\"]\\n[\"end\"]\\n')\n"
     " except OSError: pass\ndef f(x): return 0"),
    ("builtins", "import builtins\nbuiltins.AssertionError = builtins.BaseException = Warning\n"
     "builtins.isinstance = builtins.all = builtins.any = lambda *a: True\nbuiltins.exec = builtins.compile = print\n"
     "def f(x): return 0"),
    ("unittest", "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x): return 0"),
    ("modules of the verifier", "import sys\nfor m in list(sys.modules.values()):\n for n in dir(m):\n"
     "  if n in ('deliver', 'run_tests', 'ResultWriter', 'answer'): setattr(m, n, lambda *a, **k: None)\n"
     "def f(x): return 0"),
    ("the verifier's class", "import sys\nP = sys.modules['proximo_verifiers.code.inside.program_process'].Peer\n"
     "P.answer = lambda self, m: self.send(['value', [], ['o', 0]])\ndef f(x): return 0"),
    ("a trace function",
     "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x): return 0"),
    ("the frames above", "import sys\ndef f(x):\n g = sys._getframe()\n while g:\n  for v in g.f_locals.values():\n"
     "   if 'assert' in repr(v): return int(repr(v).split('==')[1].split()[0])\n  g = g.f_back\n return 0"),
    ("all objects",
     "import gc\ndef f(x):\n for o in gc.get_objects():\n  if isinstance(o, (list, tuple)) and len(o) < 9:\n"
     "   for v in o:\n    if type(v) is str and v.startswith('assert f('): return int(v.split('==')[1])\n return 0"),
    ("files", "import os\ndef f(x):\n for top in ('.', '/proc/self', '/tmp', '/proc/%d' % os.getppid(), '/dev/shm'):\n"
     "  try: names = os.listdir(top)\n  except OSError: continue\n  for n in names:\n"
     "   try: text = open(os.path.join(top, n)).read(100000)\n   except (OSError, ValueError): continue\n"
     "   if 'assert f(' in text: return int(text.split('==')[1].split()[0])\n return 0"),
    ("standard input", "import sys\ntext = sys.stdin.read()\ndef f(x): return text or 0"),
    ("answers before they are asked for",
     FRAME + "for m in [['ready'], ['value', [], True]] * 9: frame(m)\ndef f(x): return 0"),
    ("answers of no kind", FRAME + "def f(x): frame(['pass', 0, '']); frame(['end']); return 0"),
    ("an answer that is no message", "import os\ndef f(x): os.write(3, b'\\0\\0\\0\\2{}'); return 0"),
    ("an answer without end", "import os\ndef f(x): os.write(3, b'\\xff\\xff\\xff\\xff'); return 0"),
    ("an object that is the verifier's", FRAME + "def f(x): frame(['value', [], ['p', 0]])"),
    ("arguments that never were", FRAME + "def f(x): frame(['value', [['l', 1], ['l', 2]], 0])"),
    ("a thread that answers",
     FRAME + "import threading\ndef run():\n for _ in range(1000): frame(['value', [], True])\n"
     "threading.Thread(target=run, daemon=True).start()\ndef f(x): return 0"),
    ("it closes the channel", "import os\nos.close(3)\ndef f(x): return 0"),
    ("it asks the verifier for its globals",
     FRAME + "def f(x):\n for n in range(9):\n  frame(['ask', n, 'get', '__globals__', ['t', ['t'], ['t']]])\n"
     " frame(['value', [], 0])"),
    ("it calls what it was never given",
     FRAME + "def f(x): frame(['ask', 0, 'call', '', ['t', ['t', 1], ['t']]]); frame(['value', [], 0])"),
    ("an assertion that is no error",
     "import builtins\nclass A(Exception): pass\nA.__name__ = 'Skipped'\ndef f(x): raise A()"),
    ("a stop iteration", "def f(x): raise StopIteration(10)"),
    ("keys of one hash", "def f(x): return {n * (2 ** 61 - 1) for n in range(2000)}"),
    ("deeply nested", "def f(x):\n y = []\n for _ in range(10 ** 5): y = [y]\n return y"),
    ("much too large", "def f(x): return 'x' * 10 ** 7"),
    ("another name for what Python has", "int = float = str = bool = lambda x: 10\ndef f(x): return 0"),
    ("an import hook",
     "import sys\nclass H:\n def find_spec(self, *a): raise SystemExit\nsys.meta_path[:] = [H()]\ndef f(x): return 0"),
    ("an exception hook", "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef f(x): raise ValueError"),
)  # fmt: skip
