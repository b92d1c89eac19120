"""Templates of self-contained pages: one HTML file, no network, no font, only its own script."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape


def page_environment(package: str) -> Environment:
    """Templates of the folder `page` in `package`, with the filter `breakable`; an undefined name is an error.

    `base.css` is that of the audit's pages.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "page"), PackageLoader("vllm_async_spec.audit", "page")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(text: str) -> Markup:
    """A path that a narrow page may break after its slashes."""
    return Markup(str(escape(text)).replace("/", "/<wbr>"))
