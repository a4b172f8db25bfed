"""Every Python block of the README runs as it is written, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    model, mesh, llama, stages = blocks
    for block in (model, llama, stages):
        exec(compile(block, str(README), "exec"), {})
    assert (tmp_path / "runs/mine/checkpoints/step-00000001").is_dir()

    assert model.startswith("# model.py\n") and mesh.startswith("# mesh.py: torchrun --nproc-per-node 4 mesh.py\n")
    # Each rank also tells the first step's loss of the plain function, in one write, so that no two lines run together.
    tell = "import os\nos.write(1, f\"{plain['loss'].item()}\\n\".encode())\n"
    (tmp_path / "model.py").write_text(model + tell)
    (tmp_path / "mesh.py").write_text(mesh)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "mesh.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(torchrun, capture_output=True, text=True, timeout=200, env=env)
    assert run.returncode == 0, run.stderr
    losses = [float(line) for line in run.stdout.split()]
    assert len(losses) == 5 and max(losses) - min(losses) < 1e-6 * max(losses)
