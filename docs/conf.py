"""Sphinx configuration; `make docs` builds with warnings as errors."""

from importlib.metadata import version as installed_version

project = "django-durable-jobs"
author = "The django-durable-jobs contributors"
copyright = "2026, the django-durable-jobs contributors"
release = installed_version("django-durable-jobs")
version = ".".join(release.split(".")[:2])

# No intersphinx: the build must not need a network.
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Copy the command, not its prompt.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"{project} {release}"
