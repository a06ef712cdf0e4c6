"""The suite's settings with other values, for the processes that the worker's tests start.

Environment variables:

TEST_DURABLE_JOBS   the dict ``DURABLE_JOBS``, as JSON.
TEST_CONN_MAX_AGE   ``CONN_MAX_AGE`` of the database, in seconds; "none" keeps connections.
TEST_RELEASE        add the app ``tests.release``, in this release of it.
TEST_POOL           the size of Django's connection pool on PostgreSQL.
"""

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS

DURABLE_JOBS = json.loads(os.environ.get("TEST_DURABLE_JOBS", "{}"))

if (_age := os.environ.get("TEST_CONN_MAX_AGE")) is not None:
    DATABASES["default"]["CONN_MAX_AGE"] = None if _age == "none" else int(_age)

if (_size := os.environ.get("TEST_POOL")) is not None:
    DATABASES["default"].setdefault("OPTIONS", {})["pool"] = {
        "min_size": 1,
        "max_size": int(_size),
        "timeout": 60,
    }

if os.environ.get("TEST_RELEASE"):
    INSTALLED_APPS.append("tests.release")
