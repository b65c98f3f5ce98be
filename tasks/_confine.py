"""Restricts the running process; for children that run foreign code. Linux; standard library only.

Every layer of protection is tried, and layers that the kernel refuses are skipped. `confine` returns those that hold.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

# System calls by number, for each machine: (x86_64, aarch64). No sockets, no processes, no tracing, scheduling or
# signalling of others, no way to raise limits or to leave namespaces, no memory outside the address space that is
# limited; and what Landlock leaves open: owners, modes, attributes and times of files, before its version 3 their
# lengths, and watching folders.
_DENIED = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "sendto": (44, 206), "sendmsg": (46, 211),
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "setrlimit": (160, 164), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425), "memfd_create": (319, 279),
    "shmget": (29, 194), "mq_open": (240, 180), "init_module": (175, 105), "finit_module": (313, 273),
    "kexec_load": (246, 104), "reboot": (169, 142), "personality": (135, 92), "quotactl": (179, 60),
    "setpriority": (141, 140), "sched_setscheduler": (144, 119), "open_by_handle_at": (304, 265),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "socketpair": (53, 199), "semget": (64, 190),
    "msgget": (68, 186), "memfd_secret": (447, 447), "syslog": (103, 116), "sync": (162, 81), "syncfs": (306, 267),
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88), "truncate": (76, 45),
    "inotify_add_watch": (254, 27), "fanotify_init": (300, 262),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT = (56, 220), (435, 435), (302, 261)
# Calls of which only some commands, the second argument, are allowed. fcntl: descriptors, locks, a pipe's size, but not
# F_SETOWN, which sends signals to any process; ioctl: what Python asks of files, but not attributes of their inodes.
_FCNTL, _IOCTL = (72, 25), (16, 29)
_COMMANDS = {_FCNTL: (*range(8), 1030, 1032), _IOCTL: (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_EPERM, _ENOSYS = 1, 38


def confine(scratch: str | None, memory_mb: int, file_mb: int, cpu_s: int, readable: list[str]) -> list[str]:
    """Restrict this process to computing, reading below `readable`, and writing `file_mb` MiB of files in `scratch`.

    If `scratch` cannot get a file system of its own, the process may write no files, since nothing would limit their
    total size. Returns the layers that hold, out of "namespaces", "read-only mounts", "small scratch", "limits",
    "landlock", "seccomp" and "hook".
    """
    libc = ctypes.CDLL(None, use_errno=True)
    held = []
    if _leave_namespaces(libc):
        held.append("namespaces")
        if _mount_read_only(libc):
            held.append("read-only mounts")
        if scratch and _mount_scratch(libc, scratch, file_mb):
            held.append("small scratch")
    scratch = scratch if "small scratch" in held else None
    os.chdir(scratch or "/")
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/PID of this process is closed to processes of the same user
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: ends with its parent, when that is killed
    filtered = _can_filter(libc)
    _limit(memory_mb, file_mb, cpu_s, processes=not filtered)
    libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))  # no capability, be it of root or of the new namespace
    held.append("limits")
    if _restrict_files(libc, scratch, readable):
        held.append("landlock")
    if filtered and _filter_calls(libc):
        held.append("seccomp")
    _hook(scratch, readable)
    return [*held, "hook"]


def _leave_namespaces(libc: ctypes.CDLL) -> bool:
    """Enter new user, network, mount and IPC namespaces. The only network device is an inactive loopback."""
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(0x10000000 | 0x40000000 | 0x00020000 | 0x08000000) != 0:
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        return True  # the namespaces hold all the same
    return True


def _mount_read_only(libc: ctypes.CDLL) -> bool:
    """Make all mounts read-only for this process. This also protects modes, owners and times, unlike Landlock."""
    read_only = struct.pack("QQQQ", 1, 0, 0, 0)
    return libc.syscall(442, -100, b"/", 0x8000, read_only, len(read_only)) == 0  # mount_setattr, AT_RECURSIVE


def _mount_scratch(libc: ctypes.CDLL, scratch: str, file_mb: int) -> bool:
    """Mount a memory file system on the scratch folder, so that all files together are at most `file_mb` MiB."""
    options = f"size={max(file_mb, 1)}m,nr_inodes=256,mode=700".encode()
    return libc.mount(b"tmpfs", scratch.encode(), b"tmpfs", 2 | 4, options) == 0  # MS_NOSUID | MS_NODEV


def _limit(memory_mb: int, file_mb: int, cpu_s: int, processes: bool) -> None:
    limits = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: file_mb << 20,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if processes:  # counts threads, too, and everything else of the user: so none
        limits[resource.RLIMIT_NPROC] = 0
    for name, most in limits.items():
        hard = resource.getrlimit(name)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (most, most))


_READ, _EXECUTE, _READ_FOLDER = 1 << 2, 1 << 0, 1 << 3


def _restrict_files(libc: ctypes.CDLL, scratch: str | None, readable: list[str]) -> bool:
    """Forbid, with Landlock, other files and access to outside processes (/proc/PID/mem, ptrace), even for root."""
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    # files, TCP, and from version 6 abstract sockets and signals to processes outside
    attributes = struct.pack("QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc.syscall(444, attributes, len(attributes), 0)
    if rules < 0:
        return False
    allowed = [(path, _READ | _EXECUTE | _READ_FOLDER) for path in readable]
    if scratch:
        made = 1 << 1 | _READ | _READ_FOLDER | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 14
        allowed.append((scratch, made & files))
    for path, access in allowed:
        try:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            access &= ~_READ_FOLDER
        libc.syscall(445, rules, 1, struct.pack("=Qi", access, folder), 0)
        os.close(folder)
    held = libc.syscall(446, rules, 0) == 0
    os.close(rules)
    return held


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def _can_filter(libc: ctypes.CDLL) -> bool:
    known = platform.machine() in _ARCHITECTURES and sys.maxsize > 2**32
    return known and libc.prctl(21, 0, 0, 0, 0) >= 0  # PR_GET_SECCOMP


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """Refuse the system calls listed above, with seccomp."""
    code = _call_filter(*_ARCHITECTURES[platform.machine()])
    program = _Program(len(code) // 8, code)
    return libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _call_filter(column: int, architecture: int) -> bytes:
    """A classic BPF program over struct seccomp_data: number at 0, architecture at 4, arguments from 16."""
    load, equal, bits, at_least, give = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    pack = struct.Struct("HBBI").pack
    code = [
        pack(load, 0, 0, 4),
        pack(equal, 1, 0, architecture),
        pack(give, 0, 0, kill),
        pack(load, 0, 0, 0),
        pack(at_least, 0, 1, 0x40000000),  # x86's other table of numbers
        pack(give, 0, 0, refuse | _ENOSYS),
    ]
    for number in sorted(numbers[column] for numbers in _DENIED.values() if numbers[column] >= 0):
        code += [pack(equal, 0, 1, number), pack(give, 0, 0, refuse | _EPERM)]
    code += [pack(equal, 0, 1, _CLONE3[column]), pack(give, 0, 0, refuse | _ENOSYS)]
    for numbers, commands in _COMMANDS.items():
        code += [pack(equal, 0, len(commands) + 3, numbers[column]), pack(load, 0, 0, 24)]
        code += [pack(equal, len(commands) - at, 0, command) for at, command in enumerate(commands)]
        code += [pack(give, 0, 0, refuse | _EPERM), pack(give, 0, 0, allow)]
    # clone: threads only (CLONE_THREAD); prlimit64: reading only (no new limit)
    code += [
        pack(equal, 0, 4, _CLONE[column]),
        pack(load, 0, 0, 16),
        pack(bits, 0, 1, 0x10000),
        pack(give, 0, 0, allow),
        pack(give, 0, 0, refuse | _EPERM),
        pack(equal, 0, 5, _PRLIMIT[column]),
        pack(load, 0, 0, 32),
        pack(equal, 0, 2, 0),
        pack(load, 0, 0, 36),
        pack(equal, 1, 0, 0),
        pack(give, 0, 0, refuse | _EPERM),
        pack(give, 0, 0, allow),
    ]
    return b"".join(code)


_REFUSED = (
    *("socket.", "subprocess.", "os.system", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.kill", "pty."),
    *("ctypes.dlopen", "ctypes.dlsym", "os.putenv", "signal.pthread_kill", "resource.", "ftplib.", "smtplib."),
    *("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr", "os.truncate", "os.chflags"),
)
_READS = ("open", "os.listdir", "os.scandir")  # events whose first argument is a path
# Events that begin with so many paths
_CHANGES = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2}
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _hook(scratch: str | None, readable: list[str]) -> None:
    """Install an audit hook. It stops ordinary Python calls; code that looks for it, or uses ctypes, can escape it."""
    own = tuple(os.path.join(os.path.realpath(path), "") for path in (scratch,) if path)
    roots = own + tuple(os.path.join(os.path.realpath(path), "") for path in readable)

    def hook(event: str, arguments: tuple) -> None:
        changes = event in _CHANGES or (event == "open" and arguments[2] & _TO_WRITE)
        for path in arguments[: 1 if event in _READS else _CHANGES.get(event, 0)]:
            if isinstance(path, str | bytes):
                path = os.path.join(os.path.realpath(os.fsdecode(path)), "")
                if not path.startswith(own if changes else roots):
                    raise PermissionError("not permitted in the sandbox")
        if event.startswith(_REFUSED):
            raise PermissionError("not permitted in the sandbox")

    sys.addaudithook(hook)
