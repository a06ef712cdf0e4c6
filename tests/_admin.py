"""What the tests of the admin share: users with chosen permissions, urls, posted actions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import unescape
from typing import Any

from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.test import Client
from django.urls import reverse

from django_durable_jobs.models import Job

APP = "django_durable_jobs"
LIST = "admin:django_durable_jobs_job_changelist"
HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')


def staff(*permissions: str) -> Client:
    """Give a client that a new member of the staff with just these permissions has logged in."""
    user = User.objects.create_user(f"operator-{User.objects.count()}", is_staff=True)
    chosen = Permission.objects.filter(content_type__app_label=APP, codename__in=permissions)
    assert chosen.count() == len(permissions)
    user.user_permissions.set(chosen)
    return logged_in(user)


def superuser() -> Client:
    return logged_in(User.objects.create_superuser("root"))


def logged_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def list_url() -> str:
    return reverse(LIST)


def job_url(job: Job) -> str:
    return reverse("admin:django_durable_jobs_job_change", args=[job.pk])


def listed(client: Client, **query: Any) -> list[str]:
    """Give the job ids that the list shows, in its order."""
    response = client.get(list_url(), query)
    assert response.status_code == 200, response
    return [job.job_id for job in response.context["cl"].result_list]


def choose(client: Client, action: str, jobs: Iterable[Job], **more: Any) -> Any:
    """Post an action from the list, as its form does; gives the confirmation page."""
    data = {"action": action, "index": "0", "_selected_action": [job.pk for job in jobs]}
    return client.post(list_url(), data | more)


def hidden_fields(page: Any) -> dict[str, list[str]]:
    """Give the hidden fields of the confirmation page's own form."""
    form = page.content.decode().split('id="content-main"')[1]
    fields: dict[str, list[str]] = {}
    for name, value in HIDDEN.findall(form):
        fields.setdefault(name, []).append(unescape(value))
    fields.pop("csrfmiddlewaretoken", None)
    return fields


def confirm(client: Client, action: str, jobs: Iterable[Job], **more: Any) -> Any:
    """Choose an action and confirm it with the fields that the page holds."""
    page = choose(client, action, jobs)
    assert page.status_code == 200, page
    return client.post(list_url(), hidden_fields(page) | more)


def messages(response: Any) -> list[str]:
    return [str(message) for message in get_messages(response.wsgi_request)]
