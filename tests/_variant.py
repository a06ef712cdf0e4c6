"""The test settings with changes: for processes that a test starts (see ``_processes``).

TEST_SETTINGS holds a JSON object of settings; they are changed before Django starts.
"""

import json
import os

from tests.settings import *  # noqa: F403 (a settings module)

globals().update(json.loads(os.environ.get("TEST_SETTINGS", "{}")))
