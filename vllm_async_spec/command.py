"""The console script. Its imports take a moment, in which Ctrl-C may come."""


def main() -> None:
    """Run the command line; exit code 130, without a word, if Ctrl-C comes before it has begun."""
    try:
        from vllm_async_spec.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()
