"""Faults and properties of agentrl_cookbook.run that its chapter is no place for."""
import json,math,os,platform,resource,subprocess,sys
from pathlib import Path

import pytest
from hypothesis import given,strategies as st
from scipy import stats

from agentrl_cookbook import run
from agentrl_cookbook.run import (cached,check_params,check_values,load_metrics,log_metrics,mean_interval,publish,read_log,
    read_params,results,run_folder,run_id,save_env,save_metrics,setting,verdict,workspace,write_whole)

CELL = 'lr: float = 0.1  # rate\nsteps: int = 3  # steps\nrates: list[float] = [0.0]  # shares\nname = "a # b"  # text\non: bool = True  # on?'

def injected(src, above=CELL):
    ns = dict(In=["import os", above, "# Parameters\n"+src] if above else ["", "# Parameters\n"+src])
    exec(f"{above}\n{src}", ns)
    return check_params(ns)

def python(code, *args, **kwargs):
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, **kwargs)

def test_parameters_cell_is_read_without_running_it():
    declared = read_params(CELL+'\nété: str = "ü"  # a name, with accents')
    assert {k: (d["type"], d["default"], d["help"]) for k,d in declared.items()} == dict(
        lr=("float", 0.1, "rate"), steps=("int", 3, "steps"), rates=("list", [0.0], "shares"), name=("str", "a # b", "text"),
        on=("bool", True, "on?"), été=("str", "ü", "a name, with accents"))
    with pytest.raises(ValueError, match="`lr`"): read_params("lr = 2*0.1")

def test_good_values_pass():
    assert injected("lr = 2\nrates = [0.2]\non = False") == dict(lr=2.0, rates=[0.2], on=False)
    assert injected("lr = float('nan')").keys() == {"lr"}
    assert check_params({}) == check_params(dict(In=["", CELL])) == {}

@pytest.mark.parametrize("src, kind, says", [
    ("step = 4", ValueError, "There is no parameter `step`. Did you mean `steps`?"),
    ("zzz = 4", ValueError, "There are: lr, steps, rates, name, on."),
    ("lr = '1e-3'", TypeError, "Write 0.001 for YAML"),
    ("lr = '1e-05'", TypeError, "Write 0.00001 for YAML"),
    ("lr = 'fast'", TypeError, "`lr` must be float, but 'fast' is str."),
    ("steps = 4.0", TypeError, "`steps` must be int"), ("steps = True", TypeError, "is bool"),
    ("on = 1", TypeError, "`on` must be bool"), ("name = 3", TypeError, "`name` must be str"),
    ("rates = 0.2", TypeError, "`rates` must be list"), ("lr = None", TypeError, "NoneType")])
def test_bad_values_stop(src, kind, says):
    with pytest.raises(kind) as e: injected(src)
    assert says in str(e.value)

def test_lost_tag_stops():
    with pytest.raises(ValueError, match="tag"): injected("lr = 1", above="")

def test_keys_of_a_yaml_file_need_not_be_text():
    with pytest.raises(ValueError, match="`1`"): check_values(read_params(CELL), {1: 2})

def test_setting_comes_from_the_environment_then_the_nearest_file(tmp_path, monkeypatch):
    (tmp_path/"a/b").mkdir(parents=True)
    (tmp_path/"settings.ini").write_text("[runs]\nruns_dir = far\nname = 100%\n[serve]\nurl = there\n")
    (tmp_path/"a/settings.ini").write_text("[runs]\nruns_dir = near\n")
    monkeypatch.chdir(tmp_path/"a/b")
    assert setting("runs_dir") == "near" and setting("url", "none", section="serve") == "none"
    monkeypatch.chdir(tmp_path)
    assert (setting("runs_dir"), setting("name"), setting("url", section="serve")) == ("far", "100%", "there")
    monkeypatch.setenv("AGENTRL_RUNS_DIR", "elsewhere")
    assert setting("runs_dir") == "elsewhere"
    monkeypatch.setenv("AGENTRL_RUNS_DIR", "")
    assert setting("runs_dir") == "far"
    (tmp_path/"settings.ini").write_text("runs_dir = no section\n")
    with pytest.raises(ValueError, match="settings.ini cannot be read"): setting("name")

def notebook(path, code, prose="text"):
    cells = [dict(cell_type="markdown", source=[prose]), dict(cell_type="code", source=[code])]
    return write_whole(path, json.dumps(dict(cells=cells)))

def test_run_id_depends_on_code_and_parameters_only(tmp_path):
    first = run_id(notebook(tmp_path/"a.ipynb", "1"), dict(a=1, b=2))
    assert len(first) == 10 and int(first, 16) >= 0
    assert run_id(notebook(tmp_path/"b.ipynb", "1", "other prose"), dict(b=2, a=1)) == first
    assert run_id(notebook(tmp_path/"b.ipynb", "2"), dict(a=1, b=2)) != first
    assert run_id(tmp_path/"a.ipynb", dict(a=1, b=3)) != first

def test_run_id_depends_on_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(run.agentrl_cookbook, "__file__", str(write_whole(tmp_path/"p/__init__.py", "")))
    path = notebook(tmp_path/"a.ipynb", "1")
    first = run_id(path, {})
    write_whole(tmp_path/"p/part/module.py", "x = 1")
    assert run_id(path, {}) != first

def test_run_folder_is_relative_to_the_settings_file(tmp_path, monkeypatch):
    path = notebook(tmp_path/"nbs/loop/train.ipynb", "1")
    write_whole(tmp_path/"settings.ini", "[runs]\nruns_dir = kept\n")
    monkeypatch.chdir(tmp_path/"nbs/loop")
    assert run_folder("train.ipynb", {}) == tmp_path/"kept/loop/train"/run_id(path, {})
    monkeypatch.setenv("AGENTRL_RUNS_DIR", str(tmp_path/"other"))
    assert run_folder(path, {}) == tmp_path/"other/loop/train"/run_id(path, {})

def test_workspace_keeps_a_named_folder_and_removes_a_temporary_one(tmp_path):
    kept = workspace(tmp_path/"a/b")
    assert kept.is_dir() and not list(kept.iterdir())
    code = "from agentrl_cookbook.run import workspace; p = workspace(''); (p/'f').write_text('x'); print(p, p.is_dir())"
    folder,made = python(code).stdout.split()
    assert made == "True" and not Path(folder).exists()

def test_workspace_refuses_what_cannot_be_written(tmp_path):
    (tmp_path/"file").write_text("")
    with pytest.raises(OSError) as e: workspace(tmp_path/"file"/"runs")
    assert str(tmp_path/"file"/"runs") in str(e.value) and "AGENTRL_RUNS_DIR" in str(e.value)

def test_full_disk_leaves_the_old_metrics(tmp_path):
    save_metrics(dict(success=0.5), tmp_path)
    before = (tmp_path/"metrics.json").read_bytes()
    (tmp_path/"metrics.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError) as e: save_metrics(dict(success=0.9), tmp_path)
    assert "metrics.json: No space left on device" in str(e.value) and "Free some space" in str(e.value)
    assert os.listdir(tmp_path) == ["metrics.json"] and (tmp_path/"metrics.json").read_bytes() == before

def test_quota_leaves_the_old_metrics(tmp_path):
    save_metrics(dict(success=0.5), tmp_path)
    code = """import resource,sys; from agentrl_cookbook.run import save_metrics
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try: save_metrics(dict(x=list(range(10000))), sys.argv[1])
except OSError as e: print(e)"""
    assert "Cannot write" in python(code, tmp_path).stdout
    assert os.listdir(tmp_path) == ["metrics.json"] and load_metrics(tmp_path) == dict(success=0.5)

def test_metrics_that_json_cannot_hold_leave_the_old_ones(tmp_path):
    save_metrics(dict(a=1), tmp_path)
    loop = []; loop.append(loop)
    with pytest.raises(ValueError): save_metrics(dict(a=loop), tmp_path)
    assert os.listdir(tmp_path) == ["metrics.json"] and load_metrics(tmp_path) == dict(a=1)

def test_arrays_and_tensors_become_numbers(tmp_path):
    import numpy,torch
    save_metrics(dict(a=numpy.float32(0.5), b=torch.tensor([1,2]), c=numpy.arange(2), d=tmp_path), tmp_path)
    assert load_metrics(tmp_path) == dict(a=0.5, b=[1,2], c=[0,1], d=str(tmp_path))

def test_damaged_metrics_are_named(tmp_path):
    (tmp_path/"metrics.json").write_text('{"a": 1')
    with pytest.raises(ValueError, match="metrics.json is damaged"): load_metrics(tmp_path)

def test_full_disk_while_logging(tmp_path):
    (tmp_path/"metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="metrics.jsonl: No space left"): log_metrics(tmp_path, 1, reward=0.5)

@given(st.data())
def test_log_survives_a_kill_at_any_byte(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("log")
    for step in range(4): log_metrics(folder, step, stage="ü", reward=step/4)
    path = folder/"metrics.jsonl"
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    log_metrics(folder, 9, reward=1)
    complete = [dict(step=i, stage="ü", reward=i/4) for i in range(4) if len(b"".join(whole.splitlines(True)[:i+1])) <= cut+1]
    assert read_log(folder) == complete+[dict(step=9, reward=1)]

def test_log_keeps_the_last_of_a_repeated_step(tmp_path):
    for stage,step,x in [("sft",1,1), ("rl",1,2), ("rl",2,3), ("rl",1,4)]: log_metrics(tmp_path, step, stage=stage, x=x)
    log_metrics(tmp_path, 1, stage="rl", other=5)
    assert [(o["stage"], o["step"], o.get("x")) for o in read_log(tmp_path)] == [
        ("sft",1,1), ("rl",1,4), ("rl",2,3), ("rl",1,None)]
    assert read_log(tmp_path/"none") == []

def test_a_stage_runs_once_even_across_processes(tmp_path):
    code = "import os,sys; from agentrl_cookbook.run import cached; print(cached(sys.argv[1], 'sft', lambda: dict(pid=os.getpid())))"
    assert python(code, tmp_path).stdout == python(code, tmp_path).stdout != ""

def test_a_stage_that_fails_stores_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError): cached(tmp_path, "sft", lambda: 1/0)
    assert cached(tmp_path, "sft", lambda: (1,2)) == [1,2]
    with pytest.raises(ValueError, match="`metrics`"): cached(tmp_path, "metrics", dict)

def test_env_names_versions_but_not_the_host(tmp_path, root, monkeypatch):
    monkeypatch.chdir(root)
    text = save_env(tmp_path).read_text()
    env = json.loads(text)
    assert env["versions"]["trl"] == "1.16.0" and env["python"] == platform.python_version() and env["cpus"] >= 1
    assert not platform.node() or f'"{platform.node()}"' not in text

@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.floats(0.5, 0.999))
def test_interval_is_students(values, level):
    mean,lo,hi = mean_interval(values, level)
    assert lo <= mean <= hi
    want = stats.t.interval(level, len(values)-1, loc=mean, scale=stats.tstd(values)/math.sqrt(len(values)) or 1e-300)
    assert (lo, hi) == pytest.approx(want, rel=1e-6, abs=1e-6)

@pytest.mark.parametrize("values", [[1], [], [1, float("nan")], [1, float("inf")]])
def test_no_interval_without_finite_values(values):
    with pytest.raises(ValueError): mean_interval(values)

UP = [0.4, 0.5, 0.6]   # mean 0.5, interval about 0.25 to 0.75
@pytest.mark.parametrize("values, claimed, direction, outcome", [
    (UP, (0.2, 0.8), 1, "reproduced"), (UP, (0.2, None), 1, "reproduced"), (UP, (0.4, 0.6), 1, "reproduced in direction"),
    (UP, None, 1, "reproduced in direction"), (UP, (0.8, 0.9), 1, "reproduced in direction"), (UP, (-0.9, -0.8), -1, "wrong"),
    (UP, None, -1, "wrong"), ([-v for v in UP], (-0.8, -0.2), -1, "reproduced"), ([-0.5, 0.5, 0.1], (0.1, 1), 1, "not reproduced"),
    ([-0.1, 0.0, 0.1], (-0.5, 0.5), 0, "reproduced"), (UP, (-0.1, 0.1), 0, "not reproduced"), ([0, 0, 0], None, 1, "not reproduced")])
def test_verdict_follows_the_rule(values, claimed, direction, outcome, capsys):
    v = verdict("K0", values, claimed=claimed, direction=direction)
    mean,lo,hi = mean_interval(values)
    assert v == dict(id="K0", outcome=outcome, mean=mean, lo=lo, hi=hi, n=3, claimed=claimed and list(claimed))
    assert capsys.readouterr().out == f"K0 · {outcome} · {mean:.3g} [{lo:.3g}, {hi:.3g}] · 3 seeds\n"
    assert json.loads(json.dumps(v)) == v

def test_verdict_on_a_formula(capsys):
    v = verdict("K0", [], formula_error="leaves out the router")
    assert v["outcome"] == "wrong" and v["formula_error"] == "leaves out the router"
    assert capsys.readouterr().out == "K0 · wrong · leaves out the router\n"

@pytest.mark.parametrize("values, kwargs, says", [
    (UP[:2], dict(direction=1), "not enough seeds"), (UP, {}, "a claimed range or a direction"),
    (UP, dict(claimed=(0.2, 0.8), direction=-1), "does not fit"), (UP, dict(claimed=(0.8, 0.2)), "does not fit")])
def test_verdict_refuses(values, kwargs, says):
    with pytest.raises(ValueError, match=says): verdict("K0", values, **kwargs)

def finished(folder, seed, success, lr=0.1):
    write_whole(folder/"command.txt", f"agentrl run loop/toy -p seed {seed}\n")
    write_whole(folder/"params.yaml", f"lr: {lr}\nseed: {seed}\n")
    save_env(folder)
    return save_metrics(dict(success=success), folder).parent

def test_publish_merges_by_parameters_and_sorts(tmp_path, monkeypatch):
    kept = tmp_path/"nbs/results"
    for seed in (10, 2, 0): path = publish(finished(tmp_path/f"r{seed}", seed, seed/10), kept)
    monkeypatch.chdir(tmp_path/"nbs")
    assert path == kept/"loop/toy.json"
    assert [(o["seed"], o["run_id"], o["metrics"]["success"]) for o in results("loop/toy")] == [
        (0, "r0", 0), (2, "r2", 0.2), (10, "r10", 1.0)]
    before = path.read_bytes()
    assert publish(tmp_path/"r2", kept).read_bytes() == before
    publish(finished(tmp_path/"newer", 2, 0.9), kept)
    publish(finished(tmp_path/"other", 2, 0.7, lr=0.2), kept)
    assert [(o["run_id"], o["params"]["lr"]) for o in results("loop/toy")] == [
        ("r0", 0.1), ("newer", 0.1), ("other", 0.2), ("r10", 0.1)]
    [record] = [o for o in results("loop/toy") if o["run_id"] == "newer"]
    assert set(record) == {"notebook", "run_id", "seed", "params", "metrics", "command", "versions"}

def test_publish_refuses_an_unfinished_run(tmp_path):
    folder = finished(tmp_path/"r", 0, 0.5)
    (folder/"metrics.json").unlink()
    with pytest.raises(FileNotFoundError, match="not finished"): publish(folder, tmp_path/"results")
    assert not (tmp_path/"results").exists()

def test_a_damaged_stage_is_named(tmp_path):
    cached(tmp_path, "first", lambda: 1)
    (tmp_path/"first.json").write_text('{"a": ')
    with pytest.raises(ValueError, match=r"first\.json is damaged .*Delete it and repeat"): cached(tmp_path, "first", lambda: 2)
