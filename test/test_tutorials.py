"""Every tutorial runs with small sizes in a kernel of its own, and shows a full run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parent.parent / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of Jupyter, in this process; the tutorial has its own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs botorch_fed[tutorials]")
    nbformat = pytest.importorskip("nbformat", reason="needs botorch_fed[tutorials]")
    kernelspec = pytest.importorskip("ipykernel.kernelspec", reason="needs botorch_fed[tutorials]")
    # A kernel of this interpreter, wherever the user keeps others.
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    kernelspec.install(user=True, kernel_name="python3", prefix=None)
    monkeypatch.setenv("SMOKE_TEST", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder)
    client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_shows_a_full_run_and_no_machine(path: Path) -> None:
    text = path.read_text()
    for trace in (sys.prefix, "/home/", "/root/", "/work/", "/tmp/", '"output_type": "error"'):
        assert trace not in text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["execution_count"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    code = "".join("".join(cell["source"]) for cell in cells)
    assert 'SMOKE_TEST = os.environ.get("SMOKE_TEST")' in code
    words = "".join("".join(c["source"]) for c in json.loads(text)["cells"])
    for part in ("**The question.**", "**What to expect.**", "## What to try next"):
        assert part in words
