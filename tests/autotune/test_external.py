"""External explorers: each kind of good and bad one gets its verdict, and the user's tree stays."""

from __future__ import annotations

import os
import time

import pytest

from jetspec_jax.autotune import external, patches
from jetspec_jax.autotune.brief import Brief
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.external import Attempt, Budget, explore
from jetspec_jax.autotune.gate import judge
from jetspec_jax.autotune.memory import Memory
from jetspec_jax.autotune.prompts import split
from jetspec_jax.autotune.supervisor import landlock_version
from jetspec_jax.autotune.tally import Effort
from jetspec_jax.errors import ConfigError, InputError
from tests.autotune.samples import KEY
from tests.autotune.test_gate import FACTORY, SUITE
from tests.autotune.toy_tree import TOY, fingerprint, make

EFFORT = Effort(positions=80, least=40, pairs=5, tokens=8, logits=1, sampled=2)
BUDGET = Budget(
    seconds=20,
    test_seconds=60,
    gate_seconds=60,
    memory_bytes=1 << 30,
    disk_bytes=64 << 20,
    processes=40,
)
START = """
import json, os, pathlib, sys
toy = pathlib.Path("pallas_kernels/toy.py")
brief = json.loads(pathlib.Path(sys.argv[1]).read_text())
def faster(text):
    return text.replace("PAUSE_S = 0.004", "PAUSE_S = 0.0005")
"""
TESTS = ("tests/test_toy.py",)
GOOD = "toy.write_text(faster(toy.read_text()))"


@pytest.fixture
def tree(tmp_path):
    if landlock_version() < external._LEAST_LANDLOCK:
        pytest.skip("this kernel has no Landlock: external explorers are refused (tested below)")
    return make(tmp_path)


def test_without_landlock_external_explorers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(external, "landlock_version", lambda: 0)
    with pytest.raises(ConfigError, match="Landlock"):
        explore(
            "cmd:true", tree=make(tmp_path), judge=judge, out=tmp_path / "out", brief=Brief(),
            budget=BUDGET, tests=(),
        )  # fmt: skip


def attempt(tree, tmp_path, script: str, **changes) -> Attempt:
    """Runs a scripted explorer, and checks what has to hold whatever it does."""
    before = fingerprint(tree)
    (tmp_path / "explorer.py").write_text(START + script)
    calls: list[str] = []

    def gate(candidate, patched, limits, env, seconds):
        calls.append(candidate.id)
        return judge(
            Candidate(), candidate, suite=SUITE, tree=patched, base_tree=tree, seed=1,
            budget_seconds=seconds, effort=EFFORT, limits=limits, env=env, factory=FACTORY,
        )  # fmt: skip

    given = {
        "brief": Brief(prompts=split(SUITE)[0], target="pallas_kernels/toy.py"),
        "budget": BUDGET,
        "tests": (),
    }
    made = explore(
        f"cmd:{{python}} {tmp_path / 'explorer.py'} {{brief}}",
        tree=tree, judge=gate, out=tmp_path / "out", **{**given, **changes},
    )  # fmt: skip
    assert fingerprint(tree) == before
    assert os.listdir(tmp_path / "out" / "scratch") == []
    assert made.accepted == (made.patch_file is not None)
    assert bool(calls) == (made.stage == "gate")  # nothing is accepted that the gate has not seen
    assert "\n" not in made.reason
    return made


def test_a_good_patch_is_accepted_saved_and_applied_by_nobody(tree, tmp_path):
    made = attempt(tree, tmp_path, GOOD, tests=TESTS)
    assert made.accepted and made.verdict is not None, made
    assert made.changes == ("pallas_kernels/toy.py",)
    assert made.verdict.clock == "judge" and made.verdict.speed_ratio > 1.5
    text = made.patch_file.read_text()
    assert "+PAUSE_S = 0.0005" in text
    memory = Memory(tmp_path / "memory.db")
    external.record(memory, KEY, made, tree)
    best = memory.best(KEY)
    assert best is not None and best.candidate.patch == text
    changes = patches.apply_to(tree, text, tmp_path / "apply")
    assert [c.path for c in changes] == ["pallas_kernels/toy.py"]
    assert "PAUSE_S = 0.0005" in (tree / "pallas_kernels" / "toy.py").read_text()
    assert (tree / "README.md").read_text() == "committed, and changed\n"
    with pytest.raises(InputError):  # once more: it does not apply to what it made
        patches.apply_to(tree, text, tmp_path / "again")


def test_a_patch_file_is_taken_too(tree, tmp_path):
    script = (
        GOOD
        + "\nos.system('git diff --no-index /dev/null /dev/null')\n"
        + (
            "import difflib\n"
            f"old = {TOY!r}.splitlines(True)\n"
            "new = faster(''.join(old)).splitlines(True)\n"
            "name = 'pallas_kernels/toy.py'\n"
            "text = ''.join(difflib.unified_diff(old, new, 'a/' + name, 'b/' + name))\n"
            "toy.write_text(''.join(old))\n"
            "pathlib.Path('../patch.diff').write_text(text)\n"
        )
    )
    assert attempt(tree, tmp_path, script).accepted


def test_faster_on_seen_prompts_only_is_refused_with_its_counter_example(tree, tmp_path):
    script = """
sys.path.insert(0, os.getcwd())
from tests.autotune.fake_engine import FakeEngine
seen = FakeEngine({}, {}).encode([p["messages"] for p in brief["prompts"]])
code = faster(toy.read_text()).replace(
    "    return right",
    f"    return right if context[:8] in {seen!r} or len(context) % 5 else right + 1",
)
toy.write_text(code)
"""
    made = attempt(tree, tmp_path, script)
    assert not made.accepted and made.stage == "gate"
    assert made.verdict is not None and not made.verdict.tokens_identical
    assert made.verdict.mismatches
    memory = Memory(tmp_path / "memory.db")
    external.record(memory, KEY, made, tree)
    (kept,) = memory.rejected(KEY)
    assert kept.counter_example == made.verdict.counter_example


def test_a_patch_that_fails_the_tests_never_meets_the_gate(tree, tmp_path):
    wrong = "toy.write_text(toy.read_text().replace('right\\n', '7\\n'))"
    made = attempt(tree, tmp_path, wrong, tests=TESTS)
    assert not made.accepted and made.stage == "tests" and "1 failed" in made.log


EDITS = {
    "gate": "p = pathlib.Path('jetspec_jax/autotune/tally.py'); p.write_text(p.read_text() + '#')",
    "tests": "pathlib.Path('tests/test_toy.py').write_text('')",
    "suite": "pathlib.Path('serve').mkdir(); pathlib.Path('serve/suites.py').write_text('')",
    "rename": "os.rename('jetspec_jax/autotune/gate.py', 'pallas_kernels/gate.py')",
    "delete": "os.remove('tests/test_toy.py')",
    "symlink": "os.remove(toy); os.symlink('/etc/hostname', toy)",
    "new symlink": "os.symlink('toy.py', 'pallas_kernels/other.py')",
    "mode": "os.chmod(toy, 0o755)",
    "conftest": "pathlib.Path('pallas_kernels/conftest.py').write_text('')",
    "sitecustomize": "pathlib.Path('sitecustomize.py').write_text('')",
    "pth": "pathlib.Path('pallas_kernels/x.pth').write_text('import os')",
    "top-level module": "pathlib.Path('numpy.py').write_text('')",
    "shadowing package": (
        "os.mkdir('pallas_kernels/toy'); "
        "pathlib.Path('pallas_kernels/toy/__init__.py').write_text(faster(toy.read_text()))"
    ),
    "shared object": "pathlib.Path('pallas_kernels/toy.so').write_bytes(b'\\x7fELF')",
    "build file": "pathlib.Path('pyproject.toml').write_text('')",
    "ignore file": "pathlib.Path('.gitignore').write_text('')",
    "nested repository": "os.system('git init -q pallas_kernels/x && cd pallas_kernels/x && "
    "echo 1 > a.py && git add . && git -c user.name=a -c user.email=b commit -qm x')",
    "outside by patch": (
        "pathlib.Path('../patch.diff').write_text('--- /dev/null\\n+++ b/../../evil.py\\n"
        "@@ -0,0 +1 @@\\n+x\\n')"
    ),
    "noise": "pathlib.Path('../patch.diff').write_text('no patch at all')",
    "huge": "pathlib.Path('../patch.diff').write_text('x' * (2 << 20))",
    "patch is a link": "os.symlink('/etc/passwd', '../patch.diff')",
    "bytes": "toy.write_bytes(toy.read_bytes() + b'# \\xff\\xfe')",
    "nothing": "",
}


@pytest.mark.parametrize("what", EDITS)
def test_a_patch_that_touches_what_it_may_not_is_refused(tree, tmp_path, what):
    made = attempt(tree, tmp_path, EDITS[what])
    assert not made.accepted and made.stage == "patch", made
    assert made.reason.startswith("patch refused")


def test_an_explorer_that_hangs_is_ended(tree, tmp_path):
    started = time.monotonic()
    made = attempt(
        tree, tmp_path, GOOD + "\nimport time; time.sleep(600)", budget=Budget(seconds=2)
    )
    assert not made.accepted and made.stage == "explorer" and "time limit" in made.reason
    assert time.monotonic() - started < 60


def test_an_explorer_that_crashes_is_refused(tree, tmp_path):
    made = attempt(tree, tmp_path, GOOD + "\nprint('why', flush=True); os.kill(os.getpid(), 11)")
    assert not made.accepted and "SIGSEGV" in made.reason and "why" in made.log
    made = attempt(tree, tmp_path, GOOD + "\nsys.exit(3)")
    assert not made.accepted and "status 3" in made.reason


@pytest.mark.parametrize("files", [1, 1000], ids=["one file", "many files"])
def test_an_explorer_that_fills_the_disk_is_ended(tree, tmp_path, files):
    script = f"""
import time
for i in range(100_000):
    with open(f"fill-{{i % {files}}}-{{i // 64 if {files} > 1 else 0}}", "ab") as out:
        out.write(b"x" * (1 << 20))
time.sleep(60)
"""
    made = attempt(tree, tmp_path, GOOD + script)
    assert not made.accepted and made.stage == "explorer", made
    assert "disk limit" in made.reason or "SIGXFSZ" in made.reason or "status 1" in made.reason


def test_an_explorer_that_fills_memory_is_ended(tree, tmp_path):
    made = attempt(
        tree, tmp_path, GOOD + "\nheap = []\nwhile True: heap.append(bytearray(1 << 24))"
    )
    assert not made.accepted and made.stage == "explorer" and "MemoryError" in made.log


def test_many_processes_together_have_one_memory_limit(tree, tmp_path):
    script = """
import time
for _ in range(8):
    if os.fork() == 0:
        keep = bytearray(b"x" * (200 << 20))
        time.sleep(60)
time.sleep(60)
"""
    made = attempt(tree, tmp_path, GOOD + script)
    assert not made.accepted and "memory limit" in made.reason


def test_a_fork_bomb_is_ended(tree, tmp_path):
    made = attempt(
        tree,
        tmp_path,
        GOOD + "\nimport time\nfor _ in range(60): os.fork() or time.sleep(60)\ntime.sleep(60)",
    )
    assert not made.accepted and "processes limit" in made.reason


DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        for fd in (0, 1, 2): os.close(fd)
        pathlib.Path("../pid").write_text(str(os.getpid()))
        os.dup2(os.open("/dev/null", os.O_RDWR), 0)
        time.sleep(600)
    os._exit(0)
os.wait()
while not pathlib.Path("../pid").exists(): pass
print("PID", pathlib.Path("../pid").read_text(), flush=True)
"""


def test_a_daemon_is_found_and_ended(tree, tmp_path):
    made = attempt(tree, tmp_path, GOOD + DAEMON)
    assert not made.accepted and "left 1 processes behind" in made.reason
    pid = int(made.log.split("PID")[1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_patch_that_leaves_a_daemon_in_the_gate_has_none_left(tree, tmp_path):
    code = """
import os, sys
if "worker" in " ".join(sys.orig_argv) and os.fork() == 0:
    os.setsid()
    import time
    time.sleep(599)
"""
    script = GOOD + f"\ntoy.write_text(toy.read_text() + {code!r})"
    attempt(tree, tmp_path, script)
    running = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    running.append(str(tmp_path).encode() in file.read())
            except OSError:
                continue
    assert not any(running)


def test_the_users_tree_cannot_be_written(tree, tmp_path):
    script = f"""
def supervisor():
    pid = os.getpid()
    while "supervisor.py" not in pathlib.Path(f"/proc/{{pid}}/cmdline").read_text():
        pid = int(pathlib.Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])
    return pid
for act in (
    lambda: pathlib.Path({str(tree)!r}, "README.md").write_text("mine"),
    lambda: os.truncate(pathlib.Path({str(tree)!r}, "README.md"), 0),
    lambda: os.remove(pathlib.Path({str(tree)!r}, "notes.txt")),
    lambda: os.rename({str(tree)!r}, {str(tree)!r} + "2"),
    lambda: pathlib.Path({str(tree)!r}, ".git/hooks/post-commit").write_text("x"),
    lambda: pathlib.Path({str(tmp_path)!r}, "elsewhere").write_text("x"),
    lambda: pathlib.Path("../../base/pallas_kernels/toy.py").write_text("x"),
    lambda: os.kill(supervisor(), 9),
):
    try:
        act()
        sys.exit("it could")
    except PermissionError:
        pass
"""
    made = attempt(tree, tmp_path, script + GOOD)
    assert made.accepted, made


def test_changed_modes_are_put_back(tree, tmp_path):
    made = attempt(tree, tmp_path, f"os.chmod({str(tree / 'README.md')!r}, 0o777)\n" + GOOD)
    assert not made.accepted and "README.md" in made.reason


def test_wrong_arguments_are_one_line(tree, tmp_path):
    given = {"brief": Brief(), "judge": None, "out": tmp_path / "out"}
    with pytest.raises(ConfigError, match="names no command"):
        explore("cmd: ", tree=tree, **given)
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match="no git checkout"):
        explore("cmd:true", tree=tmp_path / "plain", **given)
