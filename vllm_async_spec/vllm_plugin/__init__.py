"""All code that imports vLLM: entry point, settings, patch ledger and patches."""


def register() -> None:
    """The entry point of `vllm.general_plugins`, which vLLM calls in each of its processes.

    If importing an entry point fails, vLLM logs the exception and runs without the plugin. If calling it fails, the
    process ends. So importing this module does almost nothing, and errors occur in this call.
    """
    try:
        from vllm_async_spec.vllm_plugin.plugin import entry_point
    except Exception as error:
        import logging
        import os

        why = f"vllm-async-spec can't be imported: {type(error).__name__}: {' '.join(str(error).split())}"
        if os.environ.get("VLLM_ASYNC_SPEC") == "strict":
            raise SystemExit(why) from error
        logging.getLogger("vllm.async_spec").warning("%s; running stock vLLM", why)
        return
    entry_point()
