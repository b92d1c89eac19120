try:
    from benchmarks.cli import app
except KeyboardInterrupt:  # the imports take seconds
    raise SystemExit(130) from None

app(prog_name="python -m benchmarks")
