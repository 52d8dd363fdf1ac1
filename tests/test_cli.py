"""The `agentrl` command as a user meets it: real processes, a small checkout, and everything that can go wrong."""
import fcntl,json,os,shutil,signal,subprocess,sys
from pathlib import Path

import nbformat,papermill,psutil,pytest,yaml
from nbformat.v4 import new_code_cell,new_markdown_cell,new_notebook

from agentrl_cookbook import cli

AGENTRL = Path(sys.executable).with_name("agentrl")
IMPORTS = """import json,os,signal,subprocess,sys,time
from agentrl_cookbook.run import cached,check_params,log_metrics,save_metrics,workspace
from tqdm import tqdm"""
PARAMETERS = '''out_dir: str = ""     # where the run is kept; "" keeps nothing
seed: int = 0         # of the random numbers
lr: float = 0.1       # learning rate
name: str = "x"       # a text
sizes: list = [1, 2]  # sizes, in rows
mode: str = "good"    # good, raise, late, die, silent, kill or interrupt'''
WORK = """first = cached(out, "first", lambda: (open(out/"calls", "a").write("first\\n"), seed*lr)[1])
for step in tqdm(range(3), desc="training"): log_metrics(out, step, stage="rl", reward=step/2)
print("half way")"""
FAULTS = """def wait_for_the_end(sig):
    server = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (out/"pids").write_text(f"{os.getpid()} {server.pid}")
    os.kill(os.getppid(), sig)
    time.sleep(600)
again = (out/"reached").exists()
(out/"reached").touch()
if mode == "raise": raise ValueError("the data is empty\\nsecond line")
if mode == "die": os.kill(os.getpid(), signal.SIGKILL)
if mode == "kill" and not again: wait_for_the_end(signal.SIGKILL)
if mode == "interrupt" and not again: wait_for_the_end(signal.SIGINT)"""
END = """if mode != "silent": save_metrics(dict(first=first, sizes=sizes, by_hops={"1": 0.99}), out)
assert mode != "late", "after the metrics" """

@pytest.fixture
def repo(tmp_path):
    "A checkout with one notebook"
    nb = new_notebook(cells=[new_markdown_cell("# Toy\n\n> A run with every fault")]+[
        new_code_cell(o) for o in (IMPORTS, PARAMETERS, "check_params(globals())\nout = workspace(out_dir)", WORK, FAULTS, END)])
    nb.cells[2].metadata["tags"] = ["parameters"]
    nb.metadata["kernelspec"] = dict(name="python3", display_name="python3", language="python")
    (tmp_path/"nbs/params").mkdir(parents=True)
    (tmp_path/"settings.ini").write_text("[runs]\nruns_dir = _runs\n")
    (tmp_path/"nbs/params/toy.tiny.yaml").write_text("seed: 3\nsizes: [4]\n")
    nbformat.write(nb, tmp_path/"nbs/toy.ipynb")
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Page\n\n> Only text")]), tmp_path/"nbs/page.ipynb")
    return tmp_path

def agentrl(repo, *args, env={}):
    "A finished process of the command"
    return subprocess.run([AGENTRL, *args], cwd=repo, capture_output=True, text=True, env=os.environ|env, timeout=120)

def folders(repo): return list(repo.glob("_runs/toy/*"))
def only(repo):
    [folder] = folders(repo)
    return folder

def assert_says(done, code, *sentences):
    "One sentence on stderr, in the end, and no traceback"
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr+done.stdout, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("agentrl: ")
    for s in sentences: assert s in done.stderr

def gone(repo):
    "Whether the kernel and its child have ended"
    pids = [int(o) for o in (only(repo)/"pids").read_text().split()]
    alive = [psutil.Process(p) for p in pids if psutil.pid_exists(p)]
    alive = [p for p in psutil.wait_procs(alive, timeout=10)[1] if p.status() != psutil.STATUS_ZOMBIE]
    return len(pids) == 2 and not alive

def test_list_and_params(repo):
    assert agentrl(repo, "list").stdout.splitlines() == ["page                Only text", "toy   6 parameters  A run with every fault"]
    rows = agentrl(repo/"nbs", "params", "toy").stdout.splitlines()
    assert rows[0].split() == ["name", "type", "default", "meaning"]
    assert "sizes    list   [1, 2]   sizes, in rows" in rows

@pytest.mark.parametrize("args, sentences", [
    (["-p", "sede", "1"], ["no parameter `sede`", "Did you mean `seed`?"]),
    (["-p", "seed", "1.5"], ["`seed` must be int, but 1.5 is float."]),
    (["-p", "sizes", "[1"], ["`sizes` must be list"]),
    (["-p", "out_dir", "x"], ["agentrl sets `out_dir`"]),
    (["-f", "bad.yaml"], ["bad.yaml is not YAML", "line 2"]),
    (["-f", "text.yaml"], ["text.yaml has no parameters"]),
    (["-f", "trap.yaml"], ["`lr` must be float, but '1e-3' is str. Write 0.001 for YAML"]),
    (["-f", "none.yaml"], ["Cannot read the parameters file none.yaml: No such file"]),
    (["-f", "tiny"], ["Cannot read the parameters file tiny", "Did you mean nbs/params/toy.tiny.yaml?"])])
def test_wrong_input_costs_nothing(repo, args, sentences):
    for name,text in dict(bad="seed: 1\n lr: [", text="just text", trap="lr: 1e-3").items(): (repo/f"{name}.yaml").write_text(text)
    assert_says(agentrl(repo, "run", "toy", *args), 2, *sentences)
    assert not folders(repo)

def test_unknown_names(repo):
    assert_says(agentrl(repo, "run", "toi"), 2, "no notebook `toi`", "Did you mean `toy`?")
    assert_says(agentrl(repo, "run", "page"), 2, "`page` has no parameter `out_dir`")
    assert_says(agentrl(repo, "show", "toy"), 2, "There is no run `toy` in _runs")
    assert_says(agentrl(repo, "publish", "toy"), 2, "There is no run `toy`")
    assert agentrl(repo).returncode == agentrl(repo, "walk").returncode == 2

def test_a_name_that_fits_several_runs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_RUNS_DIR", str(tmp_path))
    for run in ("abc1", "abd2"):
        (tmp_path/"toy"/run).mkdir(parents=True)
        (tmp_path/"toy"/run/"command.txt").write_text("agentrl run toy\n")
    with pytest.raises(ValueError, match="Several runs begin with `ab`: abc1, abd2"): cli.find_run("ab")
    with pytest.raises(ValueError, match="There is no run ``"): cli.find_run("")
    assert cli.find_run("abd").name == "abd2" and cli.find_run("toy").parent == tmp_path/"toy"

@pytest.mark.parametrize("name", ["stage", "part"])
def test_a_share_has_no_run_of_its_own(name):
    with pytest.raises(ValueError, match=f"`{name}` is for processes on one folder"): cli.runs.run_folder("nbs/x.ipynb", {name: "1/2"})

def test_help_has_examples(repo):
    for command in ("list", "params", "run", "show", "publish"):
        assert f"example: agentrl {command}" in agentrl(repo, command, "--help").stdout

def test_values_of_the_command_line_win_and_are_read_by_type(repo, monkeypatch):
    monkeypatch.chdir(repo)
    declared = cli.describe(repo/"nbs/toy.ipynb")[1]
    pairs = [("lr", "1e-3"), ("name", "12"), ("seed", "7"), ("sizes", "[3, 4]")]
    assert cli.given_values("toy", declared, "nbs/params/toy.tiny.yaml", pairs) == dict(lr=0.001, name="12", seed=7, sizes=[3,4])
    assert cli.given_values("toy", declared, pairs=[("lr", "2")]) == dict(lr=2.0)

def test_a_run_leaves_its_record_and_returns_at_once_when_repeated(repo):
    command = ["run", "toy", "-f", "params/toy.tiny.yaml", "-p", "name", "12", "-p", "lr", "1e-3"]
    done = agentrl(repo/"nbs", *command)
    assert done.returncode == 0, done.stderr
    folder = only(repo)
    assert {p.name for p in folder.iterdir()} == {".lock", "calls", "command.txt", "env.json", "first.json", "kernel.log", "metrics.json",
        "metrics.jsonl", "params.yaml", "reached", "toy.html", "toy.ipynb"}
    assert yaml.safe_load((folder/"params.yaml").read_text()) == dict(seed=3, lr=0.001, name="12", sizes=[4], mode="good")
    assert (folder/"command.txt").read_text() == "agentrl run toy -f nbs/params/toy.tiny.yaml -p name 12 -p lr 1e-3\n"
    assert "half way" in done.stdout and "training: 100%" in done.stderr
    for shown in ("first    0.003", "by_hops  1: 0.99", "toy.ipynb", "toy.html"): assert shown in done.stdout
    assert "half way" in (folder/"toy.html").read_text()
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    again = agentrl(repo/"nbs", *command)
    assert again.returncode == 0 and again.stdout.strip() == done.stdout.split("half way")[1].strip()
    assert all(p.stat().st_mtime_ns == t for p,t in before.items() if p.name != ".lock")
    assert agentrl(repo/"nbs", *command, "--fresh").returncode == 0
    assert (folder/"calls").read_text() == "first\n" and (folder/"first.json").stat().st_mtime_ns > before[folder/"first.json"]

def test_plain_papermill_gives_the_same_metrics(repo, monkeypatch):
    assert agentrl(repo, "run", "toy", "--seed", "2").returncode == 0
    papermill.execute_notebook(repo/"nbs/toy.ipynb", repo/"out.ipynb", parameters=dict(seed=2, out_dir=str(repo/"plain")),
                               progress_bar=False)
    assert (repo/"plain/metrics.json").read_bytes() == (only(repo)/"metrics.json").read_bytes()

def test_sigkill_ends_the_kernel_and_its_children_and_the_command_resumes(repo):
    command = ["run", "toy", "-p", "mode", "kill", "--seed", "2"]
    assert agentrl(repo, *command).returncode == -signal.SIGKILL
    assert gone(repo) and not (only(repo)/"metrics.json").exists()
    shown = agentrl(repo, "show", "toy").stdout
    assert "not finished; to resume: agentrl run toy -p mode kill -p seed 2" in shown and "reward  1" in shown
    assert_says(agentrl(repo, "publish", "toy"), 1, "the run is not finished")
    done = agentrl(repo, *command)
    assert done.returncode == 0, done.stderr
    assert (only(repo)/"calls").read_text() == "first\n"
    assert json.loads((only(repo)/"metrics.json").read_text()) == {"first": 0.2, "sizes": [1,2], "by_hops": {"1": 0.99}}

def test_ctrl_c_says_how_to_go_on(repo):
    done = agentrl(repo, "run", "toy", "-p", "mode", "interrupt")
    assert_says(done, 130, "Repeat the command to resume")
    assert gone(repo)
    assert agentrl(repo, "run", "toy", "-p", "mode", "interrupt").returncode == 0

@pytest.mark.parametrize("mode, sentence", [
    ("raise", "ValueError: the data is empty"), ("die", "The kernel was killed"),
    ("silent", "ended without metrics.json"), ("late", "AssertionError: after the metrics")])
def test_a_failed_run_says_why_and_is_not_finished(repo, mode, sentence):
    assert_says(agentrl(repo, "run", "toy", "-p", "mode", mode), 1, sentence, "Executed so far: _runs/toy/")
    assert not (only(repo)/"metrics.json").exists() and (only(repo)/"toy.ipynb").exists()
    assert "not finished" in agentrl(repo, "show", only(repo).name[:6]).stdout

def test_two_runs_do_not_share_a_folder(repo, monkeypatch):
    monkeypatch.chdir(repo)
    path = repo/"nbs/toy.ipynb"
    params = {k: d["default"] for k,d in cli.describe(path)[1].items() if k != "out_dir"}
    folder = cli.runs.workspace(cli.runs.run_folder(path, params))
    with open(folder/".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_says(agentrl(repo, "run", "toy"), 1, f"This run is going on already: see `agentrl show {folder.name}`.")
    assert os.listdir(folder) == [".lock"]

def test_unwritable_runs_folder(repo):
    (repo/"file").write_text("")
    assert_says(agentrl(repo, "run", "toy", env=dict(AGENTRL_RUNS_DIR=str(repo/"file"/"runs"))), 1, "Cannot write", "Not a directory")

def test_own_table_wins_and_results_are_published(repo):
    assert agentrl(repo, "run", "toy", "-f", "nbs/params/toy.tiny.yaml").returncode == 0
    (only(repo)/"table.txt").write_text("before  after\n")
    shown = agentrl(repo, "show", str(only(repo))).stdout
    assert "before  after" in shown and "by_hops" not in shown and ": finished" in shown
    assert agentrl(repo, "publish", "toy").stdout == "nbs/results/toy.json\n"
    [record] = json.loads((repo/"nbs/results/toy.json").read_text())
    assert record["command"] == "agentrl run toy -f nbs/params/toy.tiny.yaml" and record["seed"] == 3
    assert record["run_id"] == only(repo).name and record["metrics"]["sizes"] == [4]

def test_outside_a_checkout_it_says_where_the_notebooks_are(tmp_path, root):
    package = shutil.copytree(root/"agentrl_cookbook", tmp_path/"lib/agentrl_cookbook").parent
    (tmp_path/"home").mkdir()
    code = "from agentrl_cookbook.cli import main; raise SystemExit(main(['list']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path/"home", capture_output=True, text=True,
                          env=os.environ|dict(PYTHONPATH=str(package)))
    assert_says(done, 2, "clone the project's repository")
