"""The sandbox: each attempt behind each set of layers, what happens when parts of it are killed, and what is left."""
import os,re,shutil,socket,subprocess,sys,threading,time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil,pytest
from conftest import ROOT

from agentrl_cookbook.task import jail,sandbox
from agentrl_cookbook.task.sandbox import ATTEMPTS,GRACE,NEEDS,PRELUDE,Pool,chosen,layers
from agentrl_cookbook.task.tools import failure,success

HERE,SITE = layers(),str(Path(psutil.__file__).parent.parent)
BARE = {"limits", "no_privileges", "nobody", "seccomp"}
SETS = dict(all=set(HERE), landlock=BARE|{"landlock"}, chroot=BARE|{"chroot"}, namespaces=set(HERE)-{"seccomp"})

def only(names):
    "The layers that hold here, but no other than these"
    return {name: holds and name in names for name,holds in HERE.items()}

def made(names, **options):
    "A pool behind these layers, or skip where the machine lacks them"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "layers", lambda: only(SETS[names]))
        try: return Pool(**dict(workers=1)|options)
        except OSError as e: pytest.skip(str(e))

@pytest.fixture(scope="module", params=["all", "landlock", "chroot"])
def pools(request):
    "One for what ends by the clock, one for the rest"
    with made(request.param, seconds=0.2) as strict, made(request.param, seconds=60, memory_mb=64) as patient:
        yield strict,patient

@pytest.fixture(scope="module")
def pool():
    with Pool(workers=2, seconds=30) as made: yield made

@pytest.fixture
def own():
    "A pool that a test may break"
    with Pool(workers=1, seconds=30) as made: yield made

def kind(result): return result.get("kind", "ok")

@pytest.fixture
def family():
    "Processes that this test started and that are there"
    me,before = psutil.Process(),psutil.Process().children(recursive=True)
    return lambda: [p for p in me.children(recursive=True) if p not in before]

def until(family, n):
    "The processes, once there are `n`: a guard answers shortly before it ends"
    deadline = time.monotonic()+30
    while len(found := family()) != n and time.monotonic() < deadline: pass
    return found

@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempt(pools, name):
    right,code = ATTEMPTS[name]
    pool,began = pools["timeout" not in right],time.monotonic()
    result = pool.run(PRELUDE+code)
    assert kind(result) in right.split() and "ESCAPED" not in str(result)
    assert time.monotonic()-began < pool.limits["seconds"]+GRACE+1

def test_there_are_enough_attempts(): assert len(ATTEMPTS) >= 40

@pytest.mark.parametrize("names", SETS)
def test_the_folder_holds_the_files_and_nothing_else(names):
    with made(names) as pool:
        text = "a\r\nb é \ud800"
        read = pool.run("import os; print(os.listdir(), ascii(open('a.txt', newline='').read()))", {"a.txt": text})
        assert read == success(["['a.txt'] 'a\\r\\nb \\xe9 \\\\ud800'\n"])
        assert pool.run("import os; print(os.listdir())") == success(["[]\n"])

@pytest.mark.parametrize("names", ["landlock", "chroot"])
def test_a_folder_on_the_disk_cannot_be_written(names):
    with made(names) as pool:
        for code in ("open('b', 'w')", "open('a', 'w')", "import os; os.unlink('a')", "import os; os.mkdir('b')"):
            assert kind(pool.run(code, {"a": "1"})) == "denied"

# Without the filter of system calls, namespaces hold alone

DIAL = """
import ctypes,os,struct
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.socket(FAMILY, 1, 0)
address = ctypes.create_string_buffer(ADDRESS)
print(libc.connect(fd, address, len(address)-1), os.strerror(ctypes.get_errno()))"""

@pytest.mark.parametrize("names", SETS)
@pytest.mark.parametrize("local", [False, True])
def test_a_server_that_listens_is_not_reached(names, local):
    name = f"\0sandbox-test-{os.getpid()}".encode()
    with socket.socket(socket.AF_UNIX if local else socket.AF_INET) as server, made(names) as pool:
        server.bind(name if local else ("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        address = (1).to_bytes(2, "little")+name
        if not local:
            port = server.getsockname()[1].to_bytes(2, "big")
            address = (2).to_bytes(2, "little")+port+b"\x7f\0\0\1"+bytes(8)
        result = pool.run(DIAL.replace("FAMILY", "1" if local else "2").replace("ADDRESS", repr(address)))
        assert result["result"][0].startswith("-1 ")
        with pytest.raises(BlockingIOError): server.accept()

@pytest.mark.parametrize("name", [n for n,(right,_) in sandbox.FILES.items() if "python" in right])
def test_namespaces_alone_keep_files(name):
    with made("namespaces") as pool: assert "ESCAPED" not in str(pool.run(PRELUDE+sandbox.FILES[name][1]))

def test_namespaces_alone_keep_processes(family):
    with made("namespaces") as pool:
        [worker] = family()
        for code in ("os.kill(-1, 9)", "os.kill(0, 9)", "os.setsid(); os.fork()", "while True: os.fork()"):
            pool.run(PRELUDE+code)
            assert until(family, 1) == [worker]
        assert pool.run("print(1+1)") == success(["2\n"])

# Fail closed

@pytest.mark.parametrize("need,missing", [("files", ["mount", "chroot", "landlock"]), ("network", ["net", "seccomp"]),
    ("processes", ["pid", "seccomp"]), ("privileges", ["limits"]), ("privileges", ["no_privileges"])])
def test_no_pool_where_a_layer_is_missing(family, monkeypatch, need, missing):
    every = dict.fromkeys(HERE, True)
    assert "mount" in chosen(every)
    monkeypatch.setattr(sandbox, "layers", lambda: every | dict.fromkeys(missing, False))
    with pytest.raises(OSError, match=f"Nothing here keeps {need}"): Pool()
    assert not family()

@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_no_pool_without_linux(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sandbox, "layers", sandbox.layers.__wrapped__)
    with pytest.raises(OSError, match="use Linux"): Pool()

@pytest.mark.parametrize("ways", [way.split() for need in NEEDS.values() for way in need])
def test_a_layer_that_was_not_named_is_not_raised(ways):
    raised = chosen(dict.fromkeys({"mount", "seccomp", "no_privileges", "limits", *ways}, True))
    assert "chroot" not in raised and "landlock" not in raised

def test_code_is_not_run_when_a_layer_fails():
    with made("all", memory_mb=-1) as pool, pytest.raises(OSError, match="did not hold"): pool.run("print(1)")

def test_a_machine_whose_calls_are_not_listed():
    with pytest.raises(OSError, match="riscv64"): jail.numbers("riscv64")

def test_numbers_of_the_system_calls():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists(): pytest.skip("no kernel headers")
    known = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    assert [known[o.split(":")[0]] for o in jail.CALLS.split()] == [o.split(":")[1] for o in jail.CALLS.split()]

# Other users

CHECK = """
import sys; sys.path[:0],sys.path[-1:] = [{root!r}],[sys.path[-1],{site!r}]
from agentrl_cookbook.task.sandbox import *
pool = Pool(workers=1)
codes = "open('/etc/passwd')", "c('socket', 2, 1, 0)", "os.fork()", "1"
kinds = [pool.run(PRELUDE+code).get("kind") for code in codes]
print(*pool.layers, *kinds)
pool.close()"""

def as_other(*command, **options):
    "Layers and kinds, from a process of another user"
    return subprocess.run([*command, "-P", "-c", CHECK.format(root=str(ROOT), site=SITE)], cwd="/",
                          capture_output=True, text=True, timeout=60, **options)

@pytest.mark.skipif(os.geteuid() != 0, reason="it is an ordinary user already")
def test_an_ordinary_user():
    def starts(python):
        try: return not subprocess.run([python, "-c", "import sys; assert sys.version_info >= (3, 11)"], user=65534,
                                       cwd="/", capture_output=True).returncode
        except OSError: return False
    python = next(filter(starts, (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3")), None)
    if not python: pytest.skip("no interpreter that another user may start")
    done = as_other(python, user=65534, group=65534, extra_groups=[])
    if "Permission denied" in done.stderr: pytest.skip("another user cannot read the checkout")
    assert done.stdout.split()[-4:][1:] == ["denied", "denied", "None"], done.stderr

def test_where_user_namespaces_are_refused():
    "A user without a name in its namespace can make no other"
    if not shutil.which("unshare") or subprocess.run(["unshare", "-U", "true"], capture_output=True).returncode:
        pytest.skip("no user namespace to try it in")
    done = as_other("unshare", "-U", sys.executable)
    assert done.stdout.split() == ["landlock", "limits", "no_privileges", "nobody", "seccomp",
                                   "denied", "denied", "denied", "None"], done.stderr

# Nothing stays

def test_no_secret_of_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    find = "print(*sys.argv, *sys.orig_argv, *os.environ.values()); print(ctypes.string_at(id(object), 1<<12))"
    with Pool(workers=1) as pool: assert "hunter2" not in str(pool.run(PRELUDE+find))

def test_no_state_survives(own):
    leave = "import builtins,json; builtins.mine = json.mine = 1; open('a', 'w').write('1'); print(mine)"
    assert own.run(leave) == success(["1\n"])
    assert own.run("import json,os; print(hasattr(json, 'mine'), os.listdir())") == success(["False []\n"])
    assert own.run("print(mine)")["kind"] == "python"

def test_a_run_can_be_repeated():
    code = "import random; print(random.random(), {*'abcdefgh'})"
    with Pool(workers=1) as a, Pool(workers=1) as b: assert a.run(code) == b.run(code) == a.run(code)

def test_runs_leave_no_growth(family, own):
    [worker] = family()
    own.run("1")
    def held(): return until(family, 1), worker.num_fds(), psutil.Process().num_fds(), threading.active_count()
    before,memory = held(),worker.memory_full_info().uss
    for _ in range(100): own.run("x = bytes(10**6)", {"a": "1"*10_000})
    assert held() == before and worker.memory_full_info().uss < memory+2**20

def test_a_pool_without_workers_is_refused():
    with pytest.raises(ValueError, match="workers=0 can run nothing"): Pool(workers=0)

@pytest.mark.parametrize("names", SETS)
def test_closing_leaves_nothing(family, names):
    def held(): return psutil.Process().num_fds(), family(), threading.active_count()
    made(names).close()
    before = held()
    for _ in range(3):
        pool = made(names)
        pool.run("print(1)")
        pool.close(), pool.close()
        assert pool.folder is None or not Path(pool.folder).exists()
    assert held() == before
    with pytest.raises(ValueError, match="closed"): pool.run("print(1)")

def test_closing_waits_for_a_run_and_refuses_the_rest(family):
    pool = Pool(workers=1)
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(pool.run, "import time; time.sleep(0.5); print('done')") for _ in range(4)]
        while not pool.idle.empty(): pass
        pool.close()
        found = [r.exception() or r.result() for r in runs]
    assert success(["done\n"]) in found and all(o == success(["done\n"]) or "closed" in str(o) for o in found)
    assert not family()

PARENT = """
import sys,threading; sys.path.insert(0, {root!r})
from agentrl_cookbook.task import sandbox
here = sandbox.layers()
sandbox.layers = lambda: {{n: h and n in {names!r} for n,h in here.items()}}
pool = sandbox.Pool(workers=2, seconds=600)
pool.run("1")
threading.Thread(target=pool.run, args=("import time; time.sleep(600)",), daemon=True).start()
print(pool.folder, flush=True)
threading.Event().wait()"""

@pytest.mark.parametrize("names", SETS)
def test_no_orphan_when_the_parent_is_killed(names):
    made(names).close()
    code = PARENT.format(root=str(ROOT), names=SETS[names])
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    folder = parent.stdout.readline().decode().strip()
    left = until(lambda: psutil.Process(parent.pid).children(recursive=True), 4)
    assert len(left) == 4  # two workers, the guard, the process of the code
    parent.kill()
    parent.wait(), parent.stdout.close()
    assert psutil.wait_procs(left, timeout=30)[1] == []
    assert folder == "None" or not Path(folder).exists()

# Faults

def test_a_worker_that_was_killed_is_replaced(family, own):
    [worker] = family()
    worker.kill()
    worker.wait()
    assert own.run("print(1+1)") == success(["2\n"])
    assert len(left := until(family, 1)) == 1 and left != [worker]

def test_a_worker_that_is_killed_in_a_run(family, own):
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(own.run, "import time; time.sleep(600)")
        before = until(family, 3)
        before[0].kill()
        assert run.result()["kind"] == "python"
    assert psutil.wait_procs(before, timeout=30)[1] == []
    assert own.run("print(1+1)") == success(["2\n"])

@pytest.mark.parametrize("names", SETS)
def test_ending_a_worker_ends_what_it_started(family, names, monkeypatch):
    real,started = sandbox.start,[]
    monkeypatch.setattr(sandbox, "start", lambda *a, **options: started.append(real(*a, **options)) or started[0])
    with made(names, seconds=600) as pool, ThreadPoolExecutor(1) as threads:
        stay = "try: c('prctl', 1, 0, 0, 0, 0)\nexcept OSError: pass\ntime.sleep(600)"
        run = threads.submit(pool.run, PRELUDE+stay)
        before = until(family, 3)
        sandbox.end(started[0])
        assert psutil.wait_procs(before, timeout=30)[1] == []
        run.result()

def test_a_worker_that_does_not_answer(family, own, monkeypatch):
    monkeypatch.setattr(sandbox, "GRACE", 0.2)
    own.limits["seconds"] = 0.1
    [worker] = family()
    worker.suspend()
    assert own.run("print(1)") == failure("timeout", "no answer in time")
    assert not worker.is_running()
    monkeypatch.undo()
    own.limits["seconds"] = 30
    assert own.run("print(1+1)") == success(["2\n"])

def test_an_interrupt_while_waiting_does_not_mix_up_answers(own, monkeypatch):
    def interrupt(*_): raise KeyboardInterrupt
    monkeypatch.setattr(sandbox, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt): own.run("print('first')")
    monkeypatch.undo()
    assert own.run("print('second')") == success(["second\n"])

def test_a_worker_that_cannot_start(family, monkeypatch):
    monkeypatch.setattr(sandbox, "start", lambda code, **options: subprocess.Popen(
        [sys.executable, "-c", "1"], stdout=subprocess.PIPE, start_new_session=True, **options))
    with pytest.raises(OSError, match="did not start"): Pool()
    assert not family()

# Many at once

def test_threads_get_their_own_answers(pool):
    with ThreadPoolExecutor(8) as threads: found = list(threads.map(pool.run, [f"print({i})" for i in range(40)]))
    assert found == [success([f"{i}\n"]) for i in range(40)]

def test_endless_code_does_not_hang_the_batch():
    with Pool(workers=2, seconds=0.2) as pool, ThreadPoolExecutor(8) as threads:
        assert {kind(r) for r in threads.map(pool.run, ["while True: pass"]*8)} == {"timeout"}

# Input

@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\0b", "a\nb", ".a", "-", "x"*61, "\ud800",
                                  "a\\b"])
def test_names_of_files_are_plain(pool, name):
    with pytest.raises(ValueError, match="is no name for a file"): pool.run("1", {name: "1"})

def test_files_are_text_and_few(pool):
    with pytest.raises(ValueError, match="is no text"): pool.run("1", {"a": b"1"})
    with pytest.raises(ValueError, match="too many"): pool.run("1", {f"a{i}": "" for i in range(101)})
    assert pool.run("import os; print(len(os.listdir()))", {f"a{i}": "" for i in range(100)}) == success(["100\n"])

@pytest.mark.parametrize("code,right", [(42, "python"), (None, "python"), ("x"*(1<<21), "too_large"),
                                        ("'\ud800'", "python"), ("def", "python"), ("", "ok"), ("print('é')", "ok")])
def test_any_code_is_answered(pool, code, right): assert kind(pool.run(code)) == right

@pytest.mark.parametrize("n,right", [(2000, "ok"), (2001, "too_large")])
def test_limit_of_output(pool, n, right): assert kind(pool.run(f"print('x'*{n-1})")) == right

def test_an_error_is_one_short_line(pool):
    error = pool.run("raise ValueError('a\\nb'*1000)")["error"]
    assert error.startswith("ValueError: a ba b") and len(error) == 200
