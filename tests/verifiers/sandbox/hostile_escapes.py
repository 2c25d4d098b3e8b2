"""Programs that want out: to the network, to other files, to other processes, into the kernel."""

from sandbox_cases import says, tries

NETWORK = (
    tries(
        "tcp, udp, unix, abstract and raw sockets",
        "socket.create_connection(('127.0.0.1', PORT), 1)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
        "socket.socket(socket.AF_UNIX).connect('FOLDER/listening')",
        "socket.socket(socket.AF_UNIX).connect('\\0proximo-host-PORT')",
        "socket.socket(socket.AF_INET6, socket.SOCK_STREAM)",
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
        "socket.socketpair()",
        before="import socket",
    ),
    tries(
        "an abstract socket of its own",
        "listen()",
        before="""
import socket
def listen():
    waiting = socket.socket(socket.AF_UNIX)
    waiting.bind("\\0proximo-escape")
""",
    ),
    tries(
        "names of the network",
        "socket.getaddrinfo('localhost', 80)",
        "socket.gethostbyname('example.com')",
        before="import socket",
    ),
    tries(
        "web and mail clients",
        "http.client.HTTPConnection('127.0.0.1', PORT, timeout=1).request('GET', '/')",
        "urllib.request.urlopen('http://127.0.0.1:PORT/', timeout=1)",
        "smtplib.SMTP('127.0.0.1', PORT, timeout=1)",
        before="import http.client, urllib.request, smtplib",
    ),
    tries(
        "an event loop's connection",
        "asyncio.run(asyncio.open_connection('127.0.0.1', PORT))",
        before="import asyncio, warnings; warnings.simplefilter('ignore')",
    ),
    tries(
        "socket calls by number",
        "syscall(41, 198, 2, 1, 0)",
        "syscall(53, 199, 1, 1, 0, (ctypes.c_int * 2)())",
        "syscall(42, 203, 0, b'x', 16)",
        "syscall(44, 206, 1, b'x', 1, 0, None, 0)",
        "syscall(46, 211, 1, b'x' * 56, 0)",
        "syscall(47, 212, 0, ctypes.create_string_buffer(56), 0)",
        "syscall(49, 200, 0, b'x', 16)",
        "syscall(50, 201, 0, 1)",
        "syscall(288, 242, 0, 0, 0, 0)",
    ),
)

FILES = (
    tries(
        "the machine's files",
        *(
            f"open({path!r}, 'rb').read(10)"
            for path in (
                "/etc/passwd",
                "/etc/shadow",
                "/etc/hostname",
                "/bin/sh",
                "/usr/bin/env",
                "/proc/self/environ",
                "/proc/self/maps",
                "/proc/self/mem",
                "/proc/self/cmdline",
                "/proc/1/environ",
                "/proc/PARENT/environ",
                "/proc/PARENT/maps",
                "/proc/PARENT/mem",
                "/proc/VICTIM/environ",
                "/proc/meminfo",
                "/proc/net/tcp",
                "/sys/kernel/uevent_seqnum",
                "/dev/mem",
                "/dev/kmsg",
                "/dev/tty",
                "/dev/vda",
                "/dev/sda",
                "/dev/ptmx",
                "/var/log/dpkg.log",
                "/run/utmp",
                "FOLDER/secret.txt",
                "TESTS/cases.py",
                "PROJECT/errors.py",
            )
        ),
    ),
    tries(
        "the machine's folders",
        *(
            f"os.listdir({path!r})"
            for path in (
                "/",
                "/root",
                "/home",
                "/etc",
                "/tmp",
                "/var",
                "/proc",
                "/sys",
                "/dev",
                "/dev/shm",
                "/usr/bin",
                "/opt",
                "FOLDER",
                "TESTS",
                "PROJECT",
                "..",
                "../..",
            )
        ),
    ),
    tries(
        "ways around a name",
        *(
            f"open({path!r}).read()"
            for path in (
                "/proc/self/root/FOLDER/secret.txt",
                "/proc/self/cwd/../secret.txt",
                "/proc/self/fd/3",
                "/dev/fd/3",
                "../../../../../../../../etc/passwd",
                "/proc/PARENT/root/etc/passwd",
                "/proc/PARENT/cwd/secret.txt",
            )
        ),
    ),
    tries(
        "links to files outside",
        "open('by-symlink').read()",
        "os.link('FOLDER/secret.txt', 'by-link')",
        "os.rename('FOLDER/secret.txt', 'by-rename')",
        "open('folder/secret.txt').read()",
        "os.replace('by-symlink', 'FOLDER/proximo-escape')",
        before="os.symlink('FOLDER/secret.txt', 'by-symlink'); os.symlink('FOLDER', 'folder')",
    ),
    tries(
        "descriptors of folders",
        "os.open('secret.txt', os.O_RDONLY, dir_fd=os.open('FOLDER', os.O_PATH))",
        "os.open('..', os.O_RDONLY | os.O_DIRECTORY)",
        "os.listdir(os.open('/', os.O_RDONLY))",
        "os.listdir(os.open('..', os.O_PATH))",
        "syscall(303, 264, -100, b'FOLDER/secret.txt', bytes(136), bytes(8), 0)",
        "syscall(304, 265, -100, bytes(136), 0)",
    ),
    tries(
        "chroot and its relatives",
        "os.chroot('.')",
        "syscall(155, 41, b'.', b'.')",
        "syscall(165, 40, b'tmpfs', b'.', b'tmpfs', 0, None)",
        "syscall(166, 39, b'/', 2)",
        "syscall(428, 428, -100, b'/', 0)",
        "syscall(429, 429, 0, b'', -100, b'.', 4)",
        "syscall(430, 430, b'tmpfs', 0)",
        "syscall(442, 442, -100, b'/', 0, bytes(32), 32)",
    ),
    tries(
        "modules of the project and of others",
        "__import__('proximo')",
        "__import__('proximo_verifiers.sandbox.inside.fork_server')",
        "__import__('sandbox.cases')",
        "__import__('torch')",
        "__import__('pip')",
        "__import__('_pytest')",
        "__import__('numpy')",
    ),
    tries(
        "writing elsewhere",
        *(
            f"open({path!r}, 'w').write('x')"
            for path in (
                "/tmp/proximo-escape",
                "/dev/shm/proximo-escape",
                "/var/tmp/proximo-escape",
                "FOLDER/proximo-escape",
                "/proximo-escape",
                "../proximo-escape",
                "/dev/proximo-escape",
                "/proc/self/oom_score_adj",
                "/proc/sys/kernel/core_pattern",
            )
        ),
    ),
    tries(
        "the library itself",
        "open(os.__file__, 'a')",
        "os.unlink(os.__file__)",
        "os.truncate(os.__file__, 0)",
        "os.mkdir(os.path.dirname(os.__file__) + '/proximo-escape')",
        "os.rename(os.__file__, 'os.py')",
        "open(os.path.dirname(os.__file__) + '/proximo-escape.py', 'w')",
        "os.chmod(os.__file__, 0o777)",
    ),
    tries(
        "another's file changed",
        "open('FOLDER/secret.txt', 'w')",
        "os.unlink('FOLDER/secret.txt')",
        "os.truncate('FOLDER/secret.txt', 0)",
        "os.chmod('FOLDER/secret.txt', 0)",
        "os.utime('FOLDER/secret.txt', (0, 0))",
        "os.chown('FOLDER/secret.txt', 0, 0)",
        "os.rmdir('FOLDER')",
        "os.setxattr('FOLDER/secret.txt', 'user.x', b'x')",
        "os.chmod('FOLDER', 0o777)",
        "os.lchown('FOLDER', os.getuid(), os.getgid())",
    ),
    tries(
        "modes and times of what is not its own",
        "os.chmod('library', 0o777)",
        "os.chmod('library', 0o777, follow_symlinks=False)",
        "os.utime('library', (0, 0))",
        "os.utime('library')",
        "os.utime('/dev/null')",
        "os.chmod('/dev/null', 0o777)",
        "os.utime(0)",
        "os.utime(1, (0, 0))",
        "os.fchmod(0, 0o777)",
        "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o777)",
        "os.utime(os.open(os.__file__, os.O_RDONLY), (0, 0))",
        "os.utime('', (0, 0), follow_symlinks=False)",
        "os.utime(os.path.basename(os.__file__), (0, 0), dir_fd=os.open(os.path.dirname(os.__file__), os.O_RDONLY))",
        "os.link(os.__file__, 'mine')",
        "syscall(280, 88, 0, b'', None, 0x1000)",
        "syscall(452, 452, -100, b'library', 0o777, 0)",
        "syscall(91, 52, 0, 0o777)",
        before="os.symlink(os.__file__, 'library')",
    ),
    tries(
        "bits beyond permissions",
        *(f"os.chmod('own', {mode:#o})" for mode in (0o4700, 0o2700, 0o1700, 0o6777)),
        "os.chmod('.', 0o2777)",
        "os.fchmod(own.fileno(), 0o4777)",
        "syscall(268, 53, -100, b'own', 0o4755)",
        before="own = open('own', 'w')",
    ),
    tries(
        "pipes, sockets and devices as files",
        "os.mkfifo('fifo')",
        "os.mknod('device', 0o666 | 0x2000, 259)",
        "os.mknod('socket', 0o666 | 0xC000)",
    ),
    tries(
        "its own folder's mode and end",
        "os.rmdir(os.environ['HOME'])",
        "os.rename(os.environ['HOME'], os.environ['HOME'] + 'x')",
        "os.chmod('secret', 0o4777)",
        before="open('secret', 'w').close()",
    ),
    says(
        "nothing else is there",
        """
library = os.path.dirname(os.__file__)
seen = set()
for folder, folders, files in os.walk("/"):
    folders[:] = [each for each in folders if f"{folder}/{each}".replace("//", "/") not in (library, os.getcwd())]
    seen |= {os.path.join(folder, each) for each in files}
print(sorted(seen), os.listdir("."))
""",
        "[] []\n",
        needs="names",
    ),
    says(
        "names of the machine's files",
        """
for path in ("FOLDER/secret.txt", "FOLDER", "/etc/passwd", "/proc/self", "/tmp", "/sys", "TESTS", "PROJECT"):
    print(os.path.lexists(path), end=" ")
""",
        "False " * 8,
        needs="names",
    ),
)
