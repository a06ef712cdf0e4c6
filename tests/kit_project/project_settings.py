"""A small project as a user has it: on SQLite, or on PostgreSQL where DATABASE_URL names one."""

import os
from pathlib import Path

import environ

BASE_DIR = Path(__file__).resolve().parent

DATABASES = {
    # Django's test runner puts SQLite's test databases in memory.
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": BASE_DIR / "db.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE"},
    },
    "archive": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "archive.sqlite3"},
}
if os.environ.get("DATABASE_URL"):
    DATABASES["default"] = {
        **environ.Env.db_url_config(os.environ["DATABASE_URL"]),
        "TEST": {"NAME": f"test_kit_project_{os.getpid()}"},
    }
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = ["django_durable_jobs", "orders", "billing"]
SECRET_KEY = "a fixed key for the tests"
USE_TZ = True
# Asked for since Django 6.1; the test runners keep the mails.
MAILERS = {"default": {"BACKEND": "django.core.mail.backends.smtp.EmailBackend"}}

# On SQLite a lease must outlast the longest timeout, which is ten minutes here.
DURABLE_JOBS = {"LEASE_SECONDS": 900}
