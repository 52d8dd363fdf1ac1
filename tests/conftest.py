"""What every test shares: the checkout, a copy of it to write in, and an environment without a network."""
import os,shutil,tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set before any test module imports a library that reads them
os.environ.update(WANDB_MODE="offline", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  OMP_NUM_THREADS="1")  # two tests run side by side
for name in [k for k in os.environ if k.startswith("AGENTRL_")]: del os.environ[name]

@pytest.fixture(scope="session")
def root():
    "The checkout"
    return ROOT

@pytest.fixture(scope="session", autouse=True)
def temporary_files():
    "What tests, and the programs they kill, leave in the temporary folder goes with them"
    with tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # the jails run as nobody
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", folder)
            patch.setattr(tempfile, "tempdir", None)
            yield

@pytest.fixture
def checkout(tmp_path):
    "A copy of the checkout, without what is ignored"
    skip = shutil.ignore_patterns(".git", ".venv*", "_*s", "_proc", "*.egg-info", "__pycache__", ".*_c*", "wandb", ".hypothesis")
    return shutil.copytree(ROOT, tmp_path/"checkout", ignore=skip, symlinks=True)

@pytest.fixture(scope="module")
def one_thread():
    "Float sums in one order, and no waiting for other threads"
    import torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

@pytest.fixture(scope="module")
def database(tmp_path_factory):
    "The default company, as an SQLite file"
    from agentrl_cookbook.task.world import company
    return company(tmp_path_factory.mktemp("company")/"company.db")

@pytest.fixture(scope="module")
def g(database):
    "Its graph"
    from agentrl_cookbook.task.graph import graph
    return graph(database)
