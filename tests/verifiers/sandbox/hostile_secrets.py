"""Programs that look for what the caller or another program knows."""

from sandbox_cases import says

SECRETS = (
    says(
        "the environment is the sandbox's own",
        """
for name in ("HOME", "LANG", "LC_ALL", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONUTF8"):
    del os.environ[name]
del os.environ["TMPDIR"], os.environ["TZ"]
print(list(os.environ.items()))
""",
        "[]\n",
    ),
    says(
        "arguments are the program's own",
        """
foreign = [path for path in sys.path if "src" in path or "proximo" in path.replace(os.getcwd(), "")]
print(sys.argv, sys.orig_argv[1:], foreign)
""",
        "['program.py'] ['program.py'] []\n",
    ),
    says(
        "nothing that it can read says where the caller's package is",
        """
import gc, traceback
count, given = ctypes.c_int(), ctypes.POINTER(ctypes.c_wchar_p)()
ctypes.pythonapi.Py_GetArgcArgv(ctypes.byref(count), ctypes.byref(given))
seen = [given[number] for number in range(count.value)]
frame = sys._getframe()
while frame:
    seen += [frame.f_code.co_filename, *map(str, frame.f_globals.values()), *map(str, frame.f_locals.values())]
    frame = frame.f_back
for each in gc.get_objects():
    seen += [each.co_filename] if hasattr(each, "co_filename") else []
    seen += [str(value) for value in each.values() if isinstance(value, (str, bytes))] if type(each) is dict else []
seen += [*sys.path_importer_cache, *map(str, sys.modules.values())]
own = "this very program's text"
print(count.value, len(seen) > 100, {text for text in seen if "PROJECT" in text and own not in text} - {"PROJECT"})
""",
        "8 True set()\n",
    ),
    says("the machine has no name", "print(os.uname().nodename)", "sandbox\n", needs="names"),
    says(
        "its process is nobody in particular",
        """
print(os.getenv("USER"), os.isatty(0), os.isatty(1), os.getcwd() == os.environ["TMPDIR"])
""",
        "None False False True\n",
    ),
    says(
        "the package that confines it is not there",
        """
print([name for name in sys.modules if "proximo" in name or "sandbox" in name])
""",
        "[]\n",
    ),
    says(
        "nothing of another program is in its memory",
        """
import gc, re
libc, found, pages = ctypes.CDLL(None), set(), 0
pwrite = libc.pwrite
pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
copy = os.open("page", os.O_CREAT | os.O_RDWR)
places = {id(each) >> 24 for each in gc.get_objects()} | {id(sys) >> 24}
places.add(ctypes.addressof(ctypes.create_string_buffer(9)) >> 24)
for place in places:
    for address in range(place << 24, (place + 1) << 24, 8192):
        # The kernel does the reading: where no page is it says so, and does not end this program.
        if pwrite(copy, address, 8192, 0) > 0:
            pages += 1
            found |= set(re.findall(rb"what-another-program-knows-[0-9a-f]{16}", os.pread(copy, 8192, 0)))
print(pages > 300, found)
""",
        "True set()\n",
    ),
)
