"""Every chapter at its defaults, as a reader would run it; what it shows must be what is saved (warnings apart)."""
import json,os,subprocess,sys
from pathlib import Path

import pytest
from conftest import ROOT

NAMES = [p.relative_to(ROOT/"nbs").with_suffix("").as_posix() for p in sorted((ROOT/"nbs").rglob("*.ipynb"))
         if ".ipynb_checkpoints" not in p.parts]
SMOKE = {"quickstart"}   # minutes at its defaults: test_quickstart runs it at smoke size
TRAINS = {"policy/sft", "policy/optim", "policy/load", "policy/tiny", "loop/decode", "loop/rollout", "loop/edited",
          "loop/train", "loop/ppo", "loop/objectives", "evals/suite", "evals/monitor", "task/traces", "task/context",
          "task/hygiene", "task/contamination", "reward/learnt", "reward/traps", "reward/credit",
          "reward/hacks", "reward/reasons"}  # floats and times differ between machines: not compared

def shown(path):
    "Text that the cells of a notebook show"
    cells = json.loads(path.read_text())["cells"]
    outputs = [o for c in cells for o in c.get("outputs", []) if o.get("name") != "stderr"]
    return ["".join(o.get("text") or o.get("data", {}).get("text/plain", "")) for o in outputs]

@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [n for n in NAMES if n not in SMOKE])
def test_chapter(name, checkout):
    path = checkout/f"nbs/{name}.ipynb"
    saved = shown(path)
    run = [Path(sys.executable).with_name("nbdev-test"), path, "--n-workers", "1", "--save"]
    env = {k:v for k,v in os.environ.items() if k != "WANDB_MODE"}  # transformers prints a line about it
    done = subprocess.run(run, cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout+done.stderr)[-3000:]
    if name not in TRAINS: assert shown(path) == saved, "run nbdev-test --save, then nbdev-clean"
