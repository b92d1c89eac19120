"""Everything that imports vllm: entry point, settings, patch ledger, and the patches themselves."""


def register() -> None:
    """The entry point of `vllm.general_plugins`: vLLM calls it in each of its processes.

    vLLM logs an exception from importing an entry point and serves on without it, while one from calling it ends the
    process; so importing this module does next to nothing, and all that can fail fails in here.
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
