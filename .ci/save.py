"""python .ci/save.py nbs/loop/rollout.ipynb ...   execute chapters and save their outputs, without progress bars"""
import json,subprocess,sys
from pathlib import Path

BIN = Path(sys.executable).parent

def without_bars(path):
    "Drop what cells wrote to stderr: bars and warnings, which differ from run to run"
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        if "outputs" in cell: cell["outputs"] = [o for o in cell["outputs"] if o.get("name") != "stderr"]
    path.write_text(json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False)+"\n")

for name in sys.argv[1:]:
    subprocess.run([BIN/"nbdev-test", name, "--n-workers", "1", "--save"], check=True)
    subprocess.run([BIN/"nbdev-clean", "--fname", name], check=True)
    without_bars(Path(name))
