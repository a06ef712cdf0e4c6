"""What people are shown of payloads and results: what the project declares, never more."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client, override_settings

from django_durable_jobs import JobContext, job
from django_durable_jobs.exceptions import InvalidHandler
from django_durable_jobs.handlers import Handler, registry
from django_durable_jobs.models import Job
from django_durable_jobs.redaction import PARTS, shown
from django_durable_jobs.testing import drain

from ._rows import job_row

SECRET = "hunter2<b>"


@dataclasses.dataclass
class Login:
    user: str
    password: str


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    with registry.temporary():
        yield


@pytest.fixture
def login() -> Handler[..., Any]:
    @job("redaction.login", max_attempts=1)
    def login(ctx: JobContext, payload: Login) -> dict[str, str]:
        ctx.checkpoint([payload.password])
        return {"token": payload.password, "user": f"<i>{payload.user}"}

    return login


def hide(part: str, value: Any) -> Any:
    if part == "checkpoint":
        return None
    for key in ("password", "token"):
        if key in value:
            value[key] = "..."
    return value


def test_nothing_is_changed_without_a_redaction(login: Handler[..., Any]) -> None:
    for name in ("redaction.login", "nobody's", None):
        assert shown(name, "payload", '{ "a": 1 }') == '{ "a": 1 }'
    assert shown("redaction.login", "payload", None) is None


def test_the_hook_decides_what_is_shown(login: Handler[..., Any]) -> None:
    assert login.redact(hide) is hide
    assert shown(login.name, "payload", '{"user":"a","password":"b"}') == (
        '{"user":"a","password":"..."}'
    )
    assert shown(login.name, "checkpoint", '["b"]') == "null"
    assert shown(login.name, "result", None) is None


def test_other_handlers_are_shown_and_unknown_ones_withheld(login: Handler[..., Any]) -> None:
    """A handler that is not registered here might have had a redaction."""

    @job("redaction.open", version=3)
    def open_(ctx: JobContext) -> None: ...

    login.redact(hide)
    assert shown(open_.name, "payload", '{"password":"b"}') == '{"password":"b"}'
    for name in ("nobody's", None):
        text = shown(name, "payload", f'{{"password":"{SECRET}"}}')
        assert text is not None and text.startswith("(not shown: its handler")


@pytest.mark.parametrize(
    "text",
    ['["not an object"]', f'"{SECRET}', f'{{"password":["{SECRET}"]}}', "\ud800", "x" * 200],
)
def test_what_cannot_be_redacted_is_withheld(
    login: Handler[..., Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    @login.redact
    def hook(part: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {value["password"][0]: object()}
        raise ValueError(text)

    with override_settings(DURABLE_JOBS={"MAX_PAYLOAD_BYTES": 100, "MAX_RESULT_BYTES": 100}):
        answer = shown(login.name, "payload", text)
    assert answer is not None and answer.startswith("(not shown: ")
    assert "hunter2" not in caplog.text
    if text.startswith(("[", "{")):
        assert "the redaction of handler redaction.login failed" in caplog.text


def test_one_redaction_for_all_versions_of_a_name(login: Handler[..., Any]) -> None:
    @job("redaction.login", version=2)
    def login_2(ctx: JobContext, payload: Login) -> None: ...

    login.redact(hide)
    login_2.redact(hide)
    registry.unregister("redaction.login", 1)
    registry.unregister("redaction.login", 2)
    assert shown("redaction.login", "result", '{"token":"b"}') == '{"token":"..."}'
    with pytest.raises(InvalidHandler, match="has a redaction already"):
        login_2.redact(lambda part, value: value)


async def async_hook(part: str, value: Any) -> Any: ...


@pytest.mark.parametrize("hook", ["text", lambda value: value, async_hook])
def test_a_hook_that_cannot_work_is_refused(login: Handler[..., Any], hook: Any) -> None:
    with pytest.raises(InvalidHandler, match="redact.* 2 arguments"):
        login.redact(hook)


def test_a_temporary_registry_forgets_redactions(login: Handler[..., Any]) -> None:
    with registry.temporary():
        login.redact(hide)
    assert shown(login.name, "payload", '{"password":"b"}') == '{"password":"b"}'


ALL = {"is_staff": True, "is_superuser": True}


# In the commands -----------------------------------------------------------------------------


def command(*arguments: str) -> str:
    out = io.StringIO()
    call_command("jobs", *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.django_db
def test_the_command_shows_what_the_hook_gives(login: Handler[..., Any]) -> None:
    done = login.submit(Login("ann", SECRET))
    drain()
    assert SECRET in command("show", str(done.pk))
    login.redact(hide)
    for options in ([], ["--json"]):
        assert SECRET not in command("show", str(done.pk), *options)
        assert SECRET not in command("list", *options)
    found = json.loads(command("show", str(done.pk), "--json"))
    assert found["payload"] == '{"user":"ann","password":"..."}'
    assert found["result"] == {"token": "...", "user": "<i>ann"}
    assert found["checkpoint"] is None
    Job.objects.update(handler="nobody's")
    found = json.loads(command("show", str(done.pk), "--json"))
    assert all(found[part].startswith("(not shown: its handler") for part in PARTS)


# In the admin --------------------------------------------------------------------------------


def page_of(pk: int) -> str:
    client = Client()
    client.force_login(User.objects.get_or_create(username="root", **ALL)[0])
    page = client.get(f"/admin/django_durable_jobs/job/{pk}/change/")
    assert page.status_code == 200
    return page.content.decode()


@pytest.mark.django_db
def test_the_admin_shows_what_the_hook_gives_and_escapes_it(login: Handler[..., Any]) -> None:
    done = login.submit(Login("ann", SECRET))
    drain()
    assert "hunter2&lt;b&gt;" in page_of(done.pk)
    login.redact(hide)
    page = page_of(done.pk)
    assert "hunter2" not in page
    assert "{&quot;user&quot;:&quot;ann&quot;,&quot;password&quot;:&quot;...&quot;}" in page
    assert "&lt;i&gt;ann" in page and "<i>ann" not in page
    assert Job.objects.get(pk=done.pk).result["token"] == SECRET, "what is stored stays"


@pytest.mark.django_db
def test_the_admin_withholds_what_it_cannot_judge(login: Handler[..., Any]) -> None:
    login.redact(hide)
    stored = f'{{"password":"{SECRET}"}}'
    unknown, broken, long_one = Job.objects.bulk_create(
        [
            job_row(payload=stored),
            job_row(handler=login.name, payload=f'["{SECRET}", 1, "password"]'),
            job_row(handler=login.name, payload=f'{{"password":"{SECRET}{"x" * 5000}"}}'),
        ]
    )
    assert "its handler is not registered here" in page_of(unknown.pk)
    assert "its redaction failed" in page_of(broken.pk)
    assert "{&quot;password&quot;:&quot;...&quot;}" in page_of(long_one.pk)
    with override_settings(DURABLE_JOBS={"MAX_PAYLOAD_BYTES": 9, "MAX_RESULT_BYTES": 9}):
        assert "too long to be redacted" in page_of(login_row(stored).pk)
    for one in (unknown, broken, long_one):
        Job.objects.filter(pk=one.pk).delete()


def login_row(payload: str) -> Job:
    one = job_row(handler="redaction.login", payload=payload)
    one.save()
    return one
