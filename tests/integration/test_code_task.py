"""Programming: what answers earn, and what they cannot do to earn more."""

# ruff: noqa: E501  programs and answers stand on one line each

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_scripts.code import OPTIONS, convert
from data_scripts.writing import run_script
from tasks._generated.problems import examples
from tasks._sandbox import LAYERS, Limits, missing_layers, run_answer
from tasks._sandbox import main as show_layers
from tasks.code import Code, Exercise, find_code
from vlm_grpo.common.errors import UserError
from vlm_grpo.task import check_task, find_task
from vlm_grpo.task.check import JUNK_ANSWERS

SHORT = Limits(timeout_s=2.0)
TESTS = ["assert f(1) == 2", "assert f(2) == 4"]
EVERY_LAYER = set(LAYERS)

MBPP_ROW = {
    "task_id": 11,
    "text": "Write a python function to remove first and last occurrence of a given character from the string.",
    "code": "import re\r\ndef remove_Occ(s,ch): \r\n    s = s.replace(ch, '', 1)\r\n    i = s.rfind(ch)\r\n"
    "    return s if i < 0 else s[:i] + s[i + 1:]",
    "test_list": [
        'assert remove_Occ("hello","l") == "heo"',
        'assert remove_Occ("abcda","a") == "bcd"',
        'assert remove_Occ("PHP","P") == "H"',
    ],
    "test_setup_code": "",
    "challenge_test_list": ['assert remove_Occ("hellolloll","l") == "helollol"'],
}
SANITIZED_ROW = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 82,
    "prompt": "Write a function to find the volume of a sphere.",
    "code": "import math\ndef volume_sphere(r):\n  return (4/3)*math.pi*r*r*r",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(volume_sphere(10), 4188.790204786391, rel_tol=0.001)"],
}
HUMANEVAL_ROW = {
    "task_id": "HumanEval/38",
    "prompt": 'from typing import List\n\n\ndef encode(s: str) -> str:\n    """\n    reverses\n    """\n    return s[::-1]\n\n\n'
    'def decode(s: str) -> str:\n    """\n    undoes encode\n    """\n',
    "entry_point": "decode",
    "canonical_solution": "    return encode(s)\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    from random import choice\n    import string\n\n"
    "    letters = string.ascii_lowercase\n    for _ in range(10):\n"
    "        s = ''.join(choice(letters) for i in range(5))\n        assert candidate(encode(s)) == s\n"
    "    assert True, 'prints'\n    assert abs(len(candidate('ab')) - 2) < 1e-6, 'b'\n\n",
}


def passed(code: str, tests=TESTS, **more) -> list[bool]:
    return list(run_answer(code, tests, limits=SHORT, **more).passed)


def test_each_test_counts():
    assert passed("def f(x):\n    return 2 * x") == [True, True]
    assert passed("def f(x):\n    return 2") == [True, False]
    assert passed("f = lambda x: 2 * x") == [True, True]


def test_assertions_of_one_program_count_one_by_one():
    program = "def check(candidate):\n    assert candidate(1) == 2\n    for i in range(3):\n        assert candidate(i) == 2 * i\n    assert candidate(1) == 3\n    assert True\n"
    assert passed("def g(x):\n    return 2 * x", program, entry_point="g") == [True, True, False]
    assert passed("def g(x):\n    return 2", program, entry_point="g") == [True, False, False]
    assert passed("def g(x):\n    return 1 / 0", program, entry_point="g") == [False] * 3
    assert passed("def h(x):\n    return 2 * x", program, entry_point="g") == [False] * 3


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("class Node:\n    def __init__(s, v):\n        s.v, s.l = v, None\ndef f(n):\n    return 0 if n is None else 1 + f(n.l)",
         ["r = Node(1)\nr.l = Node(2)\nassert f(r) == 2", "assert Node(5).v == 5", "assert f([Node(1)][0]) == 1"]),
        ("def f(l):\n    l.sort()", ["a = [3, 1]\nf(a)\nassert a == [1, 3]"]),
        ("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]", "assert next(f(3)) == 0"]),
        ("import collections\ndef f(s):\n    return collections.Counter(s)", ["assert f('aab') == {'a': 2, 'b': 1}"]),
        ("def f(x):\n    raise ValueError('no')", ["try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'\nelse:\n    assert False"]),
        ("import datetime, fractions, decimal\ndef f(x):\n    return x",
         ["import datetime\nfor v in (1, 2**99, -0.5, 1j, 'é\\ud800', b'a', (1, [2, {3}]), {1: {'a': None}}, range(3), "
          "frozenset([1]), datetime.date(2020, 1, 2), datetime.timedelta(1), float('inf')):\n    assert f(v) == v and type(f(v)) is type(v)",
          "from fractions import Fraction\nassert f(Fraction(1, 3)) == Fraction(1, 3)", "assert str(f(float('nan'))) == 'nan'"]),
        ("import re\ndef f(s):\n    return re.search('a+', s)", ["assert f('baa')", "assert f('baa').group() == 'aa'", "assert not f('b')"]),
        ("def f(x):\n    print('noise' * 10000)\n    return x", ["assert f(1) == 1"]),
        ("import threading\ndef f(x):\n    r = []\n    t = threading.Thread(target=r.append, args=(x,))\n    t.start()\n    t.join()\n    return r", ["assert f(1) == [1]"]),
    ],
)  # fmt: skip
def test_right_answers_of_every_kind_pass(code, tests):
    assert passed(code, tests) == [True] * len(tests)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "def f(x):\n    while True: pass",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def f(x):\n    import os\n    os._exit(0)",
        "def f(x):\n    raise SystemExit(0)",
        "class A:\n    def __eq__(s, o): return True\ndef f(x): return A()",
        "class A(int):\n    def __eq__(s, o): return True\ndef f(x): return A()",
        "class A(list):\n    __eq__ = lambda s, o: True\n    __iter__ = lambda s: iter([2])\ndef f(x): return A()",
        "class A(type):\n    __eq__ = lambda s, o: True\nclass f(metaclass=A):\n    def __init__(s, x): pass",
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.bool = builtins.eval = lambda *a: True\ndef f(x): return 0",
        "print('[\"test\", 0, true]')\nimport os\nfor i in range(1, 64):\n  for line in (b'[\"test\", 0, true]\\n', b'[\"is\", true, []]\\n'):\n"
        "    try: os.write(i, line)\n    except OSError: pass\ndef f(x): return 0",
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        line = frame.f_locals.get('line')\n"
        "        if line:\n            for _ in range(9): line.send(['is', True, []])\n        frame = frame.f_back",
        "x = 'a' * 10**11\ndef f(x): return 2 * x",
        "def f(x):\n    y = []\n    while True: y.append(' ' * 10**6)",
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['sleep', '9'])\ndef f(x): return 2 * x",
        "import threading\nwhile True: threading.Thread(target=threading.Event().wait).start()",
        "def f(x): return f(x)",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
        "def f(x):\n    a = []\n    a.append(a)\n    return a",
        "def f(x): return '9' * 10**8",
        "assert f(1) == 2",
        "f = 2",
        "def f(",
        "\x00",
    ],
)  # fmt: skip
def test_what_does_not_return_the_values_earns_nothing(code):
    start = time.monotonic()
    assert passed(code) == [False, False]
    assert time.monotonic() - start < SHORT.timeout_s + 20  # the start of two children, on a busy machine


def test_files_of_an_answer_need_a_file_system_of_limited_size():
    code = "def f(x):\n    open('note.txt', 'w').write(x)\n    return open('note.txt').read()"
    outcome = run_answer(code, ["assert f('a') == 'a'"], limits=SHORT)
    assert outcome.passed == ("small scratch" in outcome.layers,)


CHECK = "def check(c):\n    assert c(1) == 2\n    for i in range(2, 4):\n        r = c(i)\n        assert r == 2 * i\n"


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ("return 2 * x", [True, True]),
        ("return 7", [True, False]),
        ("1 / 0", [True, False]),
        ("while True: pass", [True, False]),
        ("import os; os._exit(0)", [True, False]),
    ],
)
def test_an_assertion_in_a_loop_holds_only_if_the_loop_ends(later: str, expected: list[bool]):
    assert passed(f"def g(x):\n    if x < 3: return 2 * x\n    {later}", CHECK, entry_point="g") == expected


@pytest.mark.parametrize(
    "program",
    [
        "def check_case(x, want):\n    assert f(x) == want\ncheck_case(1, 2)\ncheck_case(3, 6)\n",
        "def check(x):\n    assert f(x) == 2 * x\ncheck(1)\ncheck(3)\n",
        "def test_next():\n    assert f(left.pop()) > 0\nleft = [3, 3, 1]\ntest_next()\ntest_next()\n",
        "class T:\n    def check(self, x):\n        assert f(x) == 2 * x\ndef test_all():\n    T().check(1)\n    T().check(3)\n",
    ],
)
def test_an_assertion_of_a_helper_holds_only_if_its_every_call_ends(program: str):
    assert passed("def f(x):\n    return 2 * x", program) == [True]
    assert passed("def f(x):\n    while x == 3: pass\n    return 2 * x", program) == [False]


def test_a_program_that_raises_has_a_result_that_failed():
    must_raise = "def check(c):\n    assert c(1) == 2\n    try:\n        c(-1)\n        assert False\n    except ValueError:\n        pass\n"
    assert passed("def g(x):\n    return 2 * x", must_raise, entry_point="g") == [True, False]
    right = "def g(x):\n    if x < 0: raise ValueError\n    return 2 * x"
    assert passed(right, must_raise, entry_point="g") == [True]
    raises = "def check(c):\n    assert c(1) == 2\n    if c(2) != 5: raise KeyError\n"
    assert passed("def g(x):\n    return 2 * x", raises, entry_point="g") == [True, False]


def test_helpers_of_a_program_are_not_called_as_its_tests():
    double = "def f(x):\n    return 2 * x"
    helper = "def test_case(x, want):\n    assert f(x) == want\ntest_case(1, 2)\ntest_case(2, 4)\n"
    assert passed(double, helper) == [True]
    assert passed("def f(x):\n    return 2", helper) == [False]
    assert passed(double, helper.replace("test_case", "check"), entry_point="f") == [True]
    assert passed(double, "def test_it(x=1):\n    assert f(x) == 2\n") == [True]


def test_an_answer_cannot_end_the_loop_of_a_test():
    tests = ["assert all(map(f, [1, 2]))", "assert not [*map(f, [1])]"]
    assert passed("def f(x):\n    raise StopIteration", tests) == [False, False]


def test_what_passed_before_a_hang_counts():
    assert passed("def f(x):\n    while x != 1: pass\n    return 2") == [True, False]


def test_helpers_of_the_tests_cannot_be_replaced_by_the_answer():
    fake = "class math:\n    isclose = lambda *a, **k: True\ndef isclose(*a): return True\ndef f(x): return 0"
    assert passed(fake, ["assert math.isclose(f(1), 2)"]) == [False]
    setup = "def close(a, b):\n    return abs(a - b) < 1\n"
    assert passed(fake + "\ndef close(a, b): return True", ["assert close(f(1), 2)"], setup=setup) == [False]
    assert passed("def f(x):\n    return 2", ["assert close(f(1), 2)"], setup=setup) == [True]


def test_nothing_outside_can_be_reached(tmp_path: Path):
    if set(run_answer("def f(x): pass", TESTS, limits=SHORT).layers) != EVERY_LAYER:
        pytest.skip("this kernel does not have every layer")
    secret = tmp_path / "secret.txt"
    secret.write_text("7")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        attempts = {
            "read": f"open({str(secret)!r}).read()",
            "list": f"os.listdir({str(tmp_path)!r})",
            "write": f"open({str(tmp_path / 'x')!r}, 'w')",
            "link": f"os.symlink({str(secret)!r}, 'l') or open('l').read()",
            "parent": "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
            "memory": "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
            "socket": f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))",
            "raw": "_socket.socket(2, 1, 0)",
            "fork": "os.fork()",
            "run": "os.system('true') and 1 / 0",
            "spawn": "subprocess.run(['/bin/true'])",
            "kill": "os.kill(os.getppid(), 0)",
            "limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
            "library": "ctypes.CDLL('libc.so.6')",
            "big": "open('big', 'wb').write(b'a' * (3 << 20))",
            "many": "[open(str(i), 'wb').write(b'a' * (1 << 19)) for i in range(9)]",
            "unshare": "ctypes.pythonapi.unshare(0)",
            "environment": "os.environ['HOME']",
            "packages": "__import__('numpy')",
        }
        modules = "import os, socket, _socket, subprocess, resource, ctypes\n"
        code = modules + "".join(f"def f_{name}():\n    return {body}\n" for name, body in attempts.items())
        tests = [
            f"try:\n    f_{name}()\nexcept (OSError, MemoryError, KeyError, ImportError):\n    pass\nelse:\n    raise ValueError"
            for name in attempts
        ]
        result = dict(zip(attempts, passed(code, tests), strict=True))
        assert [name for name, refused in result.items() if not refused] == []


@pytest.mark.parametrize("layer", ["landlock", "seccomp", "read-only mounts"])
def test_the_kernel_refuses_without_the_hook(layer: str, tmp_path: Path):
    # Each layer alone: the hook in Python is off, and of the others only one is on
    if layer not in run_answer("def f(x): pass", TESTS, limits=SHORT).layers:
        pytest.skip(f"this kernel has no {layer}")
    (tmp_path / "mine").write_text("7")
    program = f"""
import fcntl, os, struct, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tasks import _confine
import _socket, _posixsubprocess
_confine._hook = lambda *a: None
for off, name in (("landlock", "_restrict_files"), ("seccomp", "_filter_calls"), ("read-only mounts", "_leave_namespaces")):
    if off != {layer!r}:
        setattr(_confine, name, lambda *a: False)
held = _confine.confine(None if {layer!r} == "seccomp" else {str(tmp_path / "scratch")!r}, 512, 1, 5, [sys.base_prefix])
assert {layer!r} in held, held
mine, parent = {str(tmp_path / "mine")!r}, os.getppid()
def refused(call, *args):
    try:
        call(*args)
    except OSError:
        return True
    return False
if {layer!r} == "landlock":
    assert refused(open, "/etc/passwd") and refused(open, f"/proc/{{parent}}/environ")
    assert refused(os.kill, parent, 0) or sys.platform != "linux"
    assert refused(open, {str(tmp_path / "scratch" / "new")!r}, "w")  # nothing limits its size here
elif {layer!r} == "seccomp":
    assert refused(_socket.socket, 2, 1, 0) and refused(os.fork) and refused(os.kill, parent, 0)
    assert refused(os.posix_spawn, "/bin/true", ["true"], {{}}) and refused(_socket.socketpair)
    assert refused(os.chmod, mine, 0) and refused(os.utime, mine) and refused(os.truncate, mine, 0)
    assert refused(os.chown, mine, os.getuid(), os.getgid()) and refused(os.setxattr, mine, "user.a", b"b")
    assert refused(os.sched_setaffinity, parent, os.sched_getaffinity(0)) and refused(os.setpriority, 0, parent, 19)
    end = os.pipe()[0]  # the kernel signals the owner of a pipe, which may be any process
    assert refused(fcntl.fcntl, end, fcntl.F_SETOWN, parent) and refused(fcntl.fcntl, end, 15, struct.pack("ii", 1, parent))
    assert refused(fcntl.fcntl, end, fcntl.F_SETSIG, 9)
    assert fcntl.fcntl(end, fcntl.F_GETFL) == 0 and os.dup(end) and os.set_inheritable(end, True) is None
else:
    assert refused(os.chmod, mine, 0) and refused(os.utime, mine) and refused(os.truncate, mine, 0)
    assert refused(open, mine, "w") and refused(os.unlink, mine) and not refused(open, "own", "w")
"""
    (tmp_path / "scratch").mkdir()
    ended = subprocess.run([sys.executable, "-P", "-S", "-c", program], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "mine").read_text() == "7"


def test_the_hook_refuses_without_the_kernel(tmp_path: Path):
    # As on an old kernel: what a careless answer does to files must not come to pass there either
    (tmp_path / "mine").write_text("7")
    program = f"""
import os, shutil, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tasks import _confine
home, own = {str(tmp_path)!r}, {str(tmp_path / "own")!r}
os.mkdir(own)
os.chdir(own)
_confine._hook(own, [os.path.dirname(os.__file__)])
def refused(call, *args):
    try:
        call(*args)
    except PermissionError:
        return True
    return False
for call, *args in (
    (open, "../mine"), (open, "../new", "w"), (os.remove, "../mine"), (os.rename, "../mine", "theirs"), (os.mkdir, "../d"),
    (os.link, "../mine", "theirs"), (os.symlink, "../mine", "theirs"), (os.listdir, home), (os.scandir, home),
    (os.chmod, "../mine", 0), (os.truncate, "../mine", 0), (shutil.rmtree, home), (open, os.__file__, "a"),
    (os.open, os.__file__, os.O_RDWR), (os.system, "true"), (os.fork,),
):
    assert refused(call, *args), (call, args)
open("a", "w").close()
os.rename("a", "b")
os.mkdir("d")
assert sorted(os.listdir()) == ["b", "d"] and open(os.__file__).read(1)
shutil.rmtree("d")
os.remove("b")
"""
    ended = subprocess.run([sys.executable, "-P", "-S", "-c", program], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "mine").read_text() == "7"


def test_what_lies_beside_the_libraries_cannot_be_read(tmp_path: Path):
    (tmp_path / "test.jsonl").write_text("7")
    beside = (tmp_path / "test.jsonl", "/usr/bin/env", os.path.realpath(sys.executable), "/usr/local", sys.base_prefix)
    code = "import os\ndef f(path):\n    return os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1)"
    tests = [
        f"try:\n    f({str(path)!r})\nexcept PermissionError:\n    pass\nelse:\n    raise ValueError" for path in beside
    ]
    assert passed(code, [f"assert f({os.__file__!r})", *tests]) == [True] * (1 + len(beside))


def start_as(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both children start by a shell script, in which exec "$python" "$@" would be the start as it is."""
    wrapper = folder / "python"
    wrapper.write_text(f"#!/bin/sh\npython={sys.executable}\n{script}\n")
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))


def test_the_start_takes_nothing_of_the_answers_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start_as('sleep 4; exec "$python" "$@"', tmp_path, monkeypatch)
    start = time.monotonic()
    assert passed("def f(x):\n    while x != 1: pass\n    return 2") == [True, False]
    assert 4 + SHORT.timeout_s < time.monotonic() - start < 30


def test_the_answer_waits_until_both_children_are_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Else it would run before the clock does, while the other child is still starting
    script = 'case " $* " in *" test "*) sleep 2; export STARTED=$(date +%s.%N);; esac; exec "$python" "$@"'
    start_as(script, tmp_path, monkeypatch)
    code = "import time\nbegan = time.time()\ndef f():\n    return began"
    assert passed(code, ["import os\nassert f() > float(os.environ['STARTED'])"]) == [True]


def test_installed_packages_do_not_stand_before_the_library(tmp_path: Path):
    here = Path(__file__).parents[2]
    shutil.copytree(here / "tasks", tmp_path / "tasks")
    (tmp_path / "vlm_grpo/common").mkdir(parents=True)
    shutil.copy(here / "vlm_grpo/common/errors.py", tmp_path / "vlm_grpo/common")
    for name in ("json", "unittest"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not the library')")
    program = f"import sys; sys.path.append({str(tmp_path)!r}); from tasks._sandbox import main; main()"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=150)
    assert ended.stdout.startswith("layers that hold: "), ended.stderr


def test_a_start_that_fails_is_repeated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start_as(f'mkdir {tmp_path / "once"} && exit 1; exec "$python" "$@"', tmp_path, monkeypatch)
    assert passed("def f(x):\n    return 2 * x") == [True, True]
    start_as("echo a line >&2; echo no such luck >&2; echo >&2; exit 1", tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"did not start, with 512 MiB \(task_args.memory_mb\): no such luck\."):
        passed("def f(x):\n    return 2 * x")
    start_as("sleep 30", tmp_path, monkeypatch)
    monkeypatch.setattr("tasks._sandbox.START_TIMEOUT_S", 0.2)
    with pytest.raises(UserError, match=r"silent, and not ready after 0.2 s"):
        passed("def f(x):\n    return 2 * x")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"No such file or directory"):
        passed("def f(x):\n    return 2 * x")


def test_a_result_that_is_not_whole_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = r'["ready", []]\n["test", 0, true]\n["test", 1, true]'  # no end of the line, as of a tester that is killed
    says = f"for report; do :; done; printf '{lines}' > /proc/self/fd/$report; exit"
    start_as(f'case " $* " in *" test "*) {says};; esac; exec "$python" "$@"', tmp_path, monkeypatch)
    assert passed("def f(x):\n    return 2 * x") == [True, False]


def test_a_process_with_many_open_files_can_run_answers():
    # select() knows no descriptor above 1023
    with ExitStack() as stack:
        try:
            for _ in range(1100):
                stack.callback(os.close, os.dup(0))
        except OSError:
            pytest.skip("fewer than 1100 open files are allowed")
        assert passed("def f(x):\n    return 2 * x") == [True, True]


def test_it_says_which_layers_are_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    held = run_answer("def f(x): pass", TESTS, limits=SHORT).layers
    show_layers()
    assert capsys.readouterr().out.startswith(f"layers that hold: {', '.join(held)}\nlayers that are missing: ")
    monkeypatch.setattr("tasks._sandbox.LAYERS", (*LAYERS, "a wall"))
    monkeypatch.setattr("tasks.code.missing_layers", missing_layers.__wrapped__)
    assert "THE SANDBOX LACKS" in Code("examples").metric_note and " a wall here" in Code("examples").metric_note
    monkeypatch.setattr("tasks.code.missing_layers", lambda: ())
    assert "SANDBOX" not in Code("examples").metric_note


def test_other_systems_are_told_that_it_needs_linux(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.code.missing_layers", missing_layers.__wrapped__)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="needs Linux; this is darwin"):
        Code("examples")


def test_no_process_and_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for code in ("def f(x):\n    while True: pass", "def f(x):\n    return 2 * x", "import os\nos._exit(1)"):
        run_answer(code, TESTS, limits=Limits(0.5))
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_children_end_with_a_parent_that_is_killed():
    program = "from tasks._sandbox import Limits, run_answer\nrun_answer('import time; time.sleep(60)', ['assert f(1)'], limits=Limits(60))"
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    children = []
    for _ in range(600):
        children = [folder for folder in Path("/proc").glob("[0-9]*") if parent_of(folder) == parent.pid]
        if len(children) == 2 and all(b"_sandboxed" in command_of(folder) for folder in children):
            break
        time.sleep(0.05)
    assert len(children) == 2
    time.sleep(1)  # until they are confined
    parent.kill()
    parent.wait()
    for _ in range(600):
        left = [folder for folder in children if parent_of(folder) is not None]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(left)


def parent_of(process: Path) -> int | None:
    """None for a process that has ended, be it waited for or not."""
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_the_same_answer_earns_the_same_every_time():
    orders = {
        tuple(passed("def f(x):\n    return list({'a', 'b', 'c', 'd', 'e'})", ["assert f(1)[0] == 'a'"]))
        for _ in range(6)
    }
    assert len(orders) == 1


def test_tests_that_are_no_python_are_an_error():
    with pytest.raises(UserError, match="the tests are no Python"):
        run_answer("def f(x): pass", ["assert f(1) =="])


def test_the_examples_are_a_task():
    adapter = find_task("code", {}, demo=True)
    check_task(adapter, "train", limit=3)
    assert {len(adapter.samples(split)) for split in ("val", "test")} == {24}
    ids = [row["id"].partition("-")[2] for split in ("train", "val", "test") for row in examples(split)]
    assert len(set(ids)) == len(ids) == 144
    with pytest.raises(UserError, match="no split 'dev'; they have: train, val, test"):
        adapter.samples("dev")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("def f(x):\n    return x", True),
        ("```python\ndef f(x):\n    return x\n```", True),
        ("Here it is:\n```py\ndef f(x):\n    return x\n```\nUse it:\n```\nf(1)\n```", True),
        ("```\nprint(1)\n```\n```python\nf = abs\n```", True),
        ("```python\ndef f(x):\n    return x", True),
        ("<think>t</think><answer>\ndef f(x):\n    return x\n</answer>", True),
        ("async def f(x): pass", True),
        ("I would write f(x).", False),
        ("def g(x):\n    return x", False),
        ("", False),
        ("def f(x): pass" + " " * 60_000, False),
    ],
)
def test_code_is_found_in_fences_and_without(answer: str, found: bool):
    code = find_code(answer, Exercise("", "", "f", ""))
    assert (code is not None) is found
    assert code is None or "```" not in code


def test_the_rest_of_a_function_is_completed():
    adapter = Code("examples")
    from tasks._hub_rows import row_of

    sample = adapter._sample(row_of(HUMANEVAL_ROW))
    assert adapter.reward(sample, "    return s[::-1]").value == 1
    assert adapter.reward(sample, "```python\n    return encode(s)\n```").value == 1
    assert adapter.reward(sample, "def decode(s):\n    return s[::-1]").value == 1
    assert adapter.reward(sample, "def decode(s):\n    return s").value == 0.5
    cheat = "def encode(s):\n    return s\ndef decode(s):\n    return s"
    assert adapter.reward(sample, cheat).value == 0.5


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=80), st.text("def f(x):\n` \t=python", max_size=80)))
def test_any_text_has_code_or_none(text: str):
    for entry in ("f", None):
        code = find_code(text, Exercise("", "def f(x):\n", entry, ""))
        assert code is None or code.encode()


def test_a_function_may_be_called_like_one_of_pythons_own():
    reference = "def sum(a, b):\n    return a + b"
    row = {"id": "a", "question": "Add.", "tests": ["assert sum(1, 2) == 3", "assert sum(2, 2) == 4"], "setup": ""}
    adapter = Code("examples")
    sample = adapter._sample({**row, "reference": reference})
    assert adapter.reward(sample, adapter.reference_answer(sample)).value == 1
    assert adapter.reward(sample, "def sum(a, b):\n    return 3").value == 0.5
    # What only the answer calls so is no name that the tests take from it
    helper = "def len(x):\n    return 9\ndef f(x):\n    return x"
    sample = adapter._sample({**row, "tests": ["assert f(1) == 1"], "reference": helper})
    assert sample.target.entry_point is None
    assert adapter.reward(sample, "def f(x):\n    return x").value == 1


def test_junk_starts_no_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.code.run_answer", None)
    adapter = Code("examples")
    sample = adapter.samples("train")[0]
    assert [adapter.reward(sample, junk).value for junk in JUNK_ANSWERS] == [0.0] * len(JUNK_ANSWERS)


def test_rows_of_the_hub_are_a_task(monkeypatch: pytest.MonkeyPatch):
    rows = datasets.Dataset.from_list([{**MBPP_ROW, "task_id": task} for task in (511, 512)])
    asked = []
    monkeypatch.setattr("tasks.code.load_hub", lambda *arguments: asked.append(arguments[:3]) or rows)
    adapter = Code("hub", limit=1)
    check_task(adapter, "val")
    assert [sample.id for sample in adapter.samples("val")] == ["val-511"]
    assert set(asked) == {("google-research-datasets/mbpp", "full", "validation")}


def test_published_files_become_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{**MBPP_ROW, "task_id": task} for task in (5, 11, 12, 601)]
    (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps([SANITIZED_ROW]))
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(HUMANEVAL_ROW).encode() + b"\n"))
    own = {"id": "a", "question": "Twice x.", "tests": TESTS, "reference": "def f(x):\n    return 2 * x"}
    (tmp_path / "own.jsonl").write_text(json.dumps(own) + "\n")
    for name, said in (
        ("mbpp.jsonl", "test: 2 exercises (official 500, DIFFERS)"),
        ("sanitized-mbpp.json", "test: 1 exercises (official 257, DIFFERS)"),
        ("HumanEval.jsonl.gz", "test: 1 exercises (official 164, DIFFERS)"),
        ("own.jsonl", "test: 1 exercises (no official count known)"),
    ):
        out = tmp_path / name.partition(".")[0]
        assert run_script("", OPTIONS, convert, [f"out={out}", f"data={tmp_path / name}"]) == 0
        assert said in capsys.readouterr().out
        check_task(Code(str(out)), "test")
    adapter = Code(str(tmp_path / "mbpp"), shown_tests=None)
    assert adapter.samples("test")[0].question.count("assert") == 3
    assert len(adapter.samples("train")) == len(adapter.samples("prompt")) == 1
    assert (
        run_script("", OPTIONS, convert, ["--limit", "1", f"out={tmp_path / 'one'}", f"data={tmp_path / 'mbpp.jsonl'}"])
        == 0
    )
    assert "test: 1 exercises (official 500, limit=1)" in capsys.readouterr().out


def test_bad_files_are_errors_that_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.jsonl").write_text(json.dumps({**MBPP_ROW, "test_list": ["assert f(1) =="]}) + "\n")
    assert run_script("", OPTIONS, convert, [f"out={tmp_path / 'o'}", f"data={tmp_path / 'bad.jsonl'}"]) == 2
    assert "1 programs that are no Python: mbpp-11: tests" in capsys.readouterr().err
    for tests in ([], None, 3):
        (tmp_path / "bad.jsonl").write_text(json.dumps({"id": "a", "question": "b", "tests": tests}) + "\n")
        assert run_script("", OPTIONS, convert, [f"out={tmp_path / 'o'}", f"data={tmp_path / 'bad.jsonl'}"]) == 2
        assert f"1 exercises without a test: a of {tmp_path / 'bad.jsonl'}" in capsys.readouterr().err
    good = {"id": 7, "question": "b", "tests": TESTS}
    for change, said in (
        ({"tests": [3]}, "1 programs that are no Python: 7: tests"),
        ({"setup": 3}, "1 programs that are no Python: 7: setup"),
        ({"id": None}, "row 1: not MBPP's, HumanEval's or our own form: TypeError('the id is None"),
        ({**MBPP_ROW, "task_id": "a"}, "row 1: not MBPP's, HumanEval's or our own form: ValueError"),
    ):
        (tmp_path / "bad.jsonl").write_text(json.dumps(good | change) + "\n")
        assert run_script("", OPTIONS, convert, [f"out={tmp_path / 'o'}", f"data={tmp_path / 'bad.jsonl'}"]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "good.jsonl").write_text(json.dumps(good) + "\n")
    assert run_script("", OPTIONS, convert, [f"out={tmp_path / 'g'}", f"data={tmp_path / 'good.jsonl'}"]) == 0
    assert json.loads((tmp_path / "g/test.jsonl").read_text())["id"] == "7"
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\n')
    assert run_script("", OPTIONS, convert, [f"out={tmp_path / 'o'}", f"data={tmp_path / 'bad.jsonl'}"]) == 2
    assert "row 1: not MBPP's, HumanEval's or our own form: KeyError('id')" in capsys.readouterr().err
    (tmp_path / "o").mkdir(exist_ok=True)
    (tmp_path / "o/test.jsonl").write_text('{"id": "a", "question": "b", "tests": 3}\n')
    with pytest.raises(UserError, match=r"test.jsonl:1: .*tests must be a list of programs"):
        Code(str(tmp_path / "o")).samples("test")[0]
    with pytest.raises(UserError, match=r"task_args.timeout_s is 0; accepted: a number from 0.2"):
        Code("examples", timeout_s=0)
    with pytest.raises(UserError, match="task code has no data"):
        Code()
    with pytest.raises(UserError, match=r"task_args.dataset='humaneval' names .* task_args.data is 'examples'"):
        Code("examples", dataset="humaneval")
    with pytest.raises(UserError, match=r"task_args.dataset is 'apps'; accepted: mbpp, humaneval"):
        Code("hub", dataset="apps")


def test_as_many_answers_run_at_a_time_as_there_are_cores_to_use():
    program = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from tasks.code import Code; print(Code.reward_threads)"
    assert (
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            check=True,
        ).stdout
        == "1\n"
    )


def test_whatever_a_test_raises_fails_it_alone():
    setup = "class Odd(Exception):\n    pass\ndef odd(x):\n    raise Odd\n"
    tests = [
        "assert f(1) == 2",
        "odd(f(1))",
        "import unittest; raise unittest.SkipTest",
        "exit(f(1))",
        "assert f(2) == 4",
    ]
    assert passed("def f(x):\n    return 2 * x", tests, setup=setup) == [True, False, False, False, True]
    own = "class Odd(Exception):\n    pass\ndef f(x):\n    if x == 1:\n        raise Odd\n    return 2 * x"
    assert passed(own) == [False, True]
