"""The hub's side of a run: everything happens in `botorch_fed.deploy.serve`."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a study to its end."""
    from botorch_fed.deploy import serve

    serve(grid, context.run_config)
