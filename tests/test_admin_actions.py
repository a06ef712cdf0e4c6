"""The admin's actions: confirmed, permitted, each job for itself, and written down."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection, transaction
from django.test import Client

from django_durable_jobs import JobContext, job
from django_durable_jobs.admin import actions, job_actions
from django_durable_jobs.admin.operations import operate
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job, OperatorAction
from tests._admin import (
    choose,
    confirm,
    hidden_fields,
    job_url,
    list_url,
    messages,
    staff,
    superuser,
)
from tests._rows import NOW, attempt_row, job_row
from tests.racing import Held, held
from tests.transitions.live import LONG_AGO

NAMES = ("request_cancel", "retry", "release")
PERMISSIONS = {"request_cancel": "cancel_job", "retry": "retry_job", "release": "release_job"}


def saved(**changes: Any) -> Job:
    row = job_row(**changes)
    row.save()
    return row


def running(**changes: Any) -> Job:
    row = saved(
        status="running", attempt_count=1, lease_token="t" * 32, lease_expires_at=NOW, **changes
    )
    attempt_row(row, number=1, token="t" * 32).save()
    return row


def failed(**changes: Any) -> Job:
    return saved(**({"status": "failed", "attempt_count": 1, "finished_at": NOW} | changes))


def blocked(**changes: Any) -> Job:
    return saved(status="blocked", blocked_reason="unknown_handler", **changes)


def statuses() -> dict[str, str]:
    return dict(Job.objects.values_list("job_id", "status"))


def rows() -> list[Any]:
    return list(Job.objects.order_by("pk").values())


@pytest.mark.django_db
class TestPermissions:
    @pytest.mark.parametrize("name", NAMES)
    def test_a_viewer_changes_nothing(self, name: str) -> None:
        client = staff("view_job")
        chosen = [saved(), failed(), blocked(), running()]
        before = rows()
        page = client.get(list_url()).content.decode()
        assert f'value="{name}"' not in page
        choose(client, name, chosen)
        choose(client, name, chosen, confirm="yes", extra_attempts="1")
        data = {"action": name, "_selected_action": [one.pk for one in chosen], "confirm": "yes"}
        client.post(list_url(), data | {"extra_attempts": "0"})
        client.post(list_url(), data | {"select_across": "1"})
        for one in chosen:
            assert client.post(job_url(one), data).status_code == 403
        assert rows() == before
        assert not OperatorAction.objects.exists() and not LogEntry.objects.exists()

    @pytest.mark.parametrize("name", NAMES)
    def test_each_action_has_a_permission_of_its_own(self, name: str) -> None:
        others = [PERMISSIONS[other] for other in NAMES if other != name]
        one = {"request_cancel": saved, "retry": failed, "release": blocked}[name]()
        before = rows()
        data = {"action": name, "_selected_action": one.pk, "confirm": "yes", "extra_attempts": "0"}
        staff("view_job", *others).post(list_url(), data)
        assert rows() == before
        staff("view_job", PERMISSIONS[name]).post(list_url(), data)
        assert rows() != before

    @pytest.mark.parametrize("name", NAMES)
    def test_the_permission_alone_opens_no_list(self, name: str) -> None:
        one = failed()
        data = {"action": name, "_selected_action": one.pk, "confirm": "yes", "extra_attempts": "0"}
        assert staff(PERMISSIONS[name]).post(list_url(), data).status_code == 403
        assert statuses() == {one.job_id: "failed"}

    @pytest.mark.parametrize("name", NAMES)
    def test_who_is_not_logged_in_changes_nothing(self, name: str) -> None:
        one = failed()
        data = {"action": name, "_selected_action": one.pk, "confirm": "yes", "extra_attempts": "0"}
        assert Client().post(list_url(), data).status_code == 302
        assert statuses() == {one.job_id: "failed"}

    def test_a_post_without_the_csrf_token_is_refused(self) -> None:
        client = staff("view_job", "retry_job")
        client.handler.enforce_csrf_checks = True
        one = failed()
        data = {"action": "retry", "_selected_action": one.pk, "confirm": "yes"}
        assert client.post(list_url(), data | {"extra_attempts": "0"}).status_code == 403
        assert statuses() == {one.job_id: "failed"}


@pytest.mark.django_db
class TestConfirmation:
    @pytest.mark.parametrize("name", NAMES)
    def test_it_asks_before_it_acts(self, name: str) -> None:
        client = superuser()
        chosen = [saved(), failed(), blocked()]
        before = rows()
        page = choose(client, name, chosen)
        assert page.status_code == 200
        assert rows() == before
        text = page.content.decode()
        assert all(one.job_id in text for one in chosen) and "3 jobs" in text
        fields = hidden_fields(page)
        assert fields["action"] == [name] and fields["confirm"] == ["yes"]
        assert fields["_selected_action"] == [str(one.pk) for one in reversed(chosen)]

    def test_only_the_word_yes_confirms(self) -> None:
        client = superuser()
        one = failed()
        choose(client, "retry", [one], confirm="no", extra_attempts="0")
        assert statuses() == {one.job_id: "failed"}

    def test_it_takes_the_jobs_that_were_shown_though_the_filter_has_lost_them(self) -> None:
        client = superuser()
        one = failed(job_id="o-1")
        url = f"{list_url()}?status__exact=failed"
        page = client.post(url, {"action": "retry", "index": "0", "_selected_action": one.pk})
        Job.objects.update(status="cancelled")
        answer = client.post(url, hidden_fields(page) | {"extra_attempts": "0"})
        assert answer.url == url
        assert statuses() == {"o-1": "queued"}

    def test_all_across_the_pages_means_those_that_the_page_listed(self) -> None:
        client = superuser()
        Job.objects.bulk_create(job_row() for _ in range(60))
        newest = Job.objects.latest("pk")
        page = choose(client, "request_cancel", [newest], select_across="1")
        late = saved()
        answer = client.post(list_url(), hidden_fields(page))
        assert messages(answer) == ["60 cancelled."]
        assert statuses()[late.job_id] == "queued"

    def test_an_action_is_bounded_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(actions, "MAX_ROWS", 30)
        client = superuser()
        Job.objects.bulk_create(job_row() for _ in range(60))
        newest = Job.objects.latest("pk")
        page = choose(client, "request_cancel", [newest], select_across="1")
        text = page.content.decode()
        assert "the first 30 of the list are taken" in text
        assert "30 jobs" in text and "and 10 more." in text
        assert messages(client.post(list_url(), hidden_fields(page))) == ["30 cancelled."]
        again = {"action": "request_cancel", "_selected_action": newest.pk, "confirm": "yes"}
        client.post(list_url(), again | {"select_across": "1"})
        client.post(list_url(), again | {"select_across": "1"})
        assert Job.objects.filter(status="cancelled").count() == 30

    def test_the_bound_is_under_what_django_accepts_in_one_form(self, settings: Any) -> None:
        assert settings.DATA_UPLOAD_MAX_NUMBER_FIELDS > actions.MAX_ROWS + 10

    def test_jobs_that_are_gone_are_told(self) -> None:
        client = superuser()
        page = choose(client, "retry", [failed(), failed()])
        Job.objects.all().delete()
        answer = client.post(list_url(), hidden_fields(page) | {"extra_attempts": "0"})
        assert messages(answer) == ["None of these is there any more."]


@pytest.mark.django_db
class TestMoves:
    def test_cancel_tells_what_became_of_each(self) -> None:
        client = superuser()
        chosen = [saved(), saved(status="scheduled"), blocked(), running(), failed()]
        answer = confirm(client, "request_cancel", chosen)
        assert answer.status_code == 302
        (told,) = messages(answer)
        assert set(told.rstrip(".").split(", ")) == {
            "3 cancelled",
            "1 asked to stop",
            "1 unchanged",
        }
        assert [statuses()[one.job_id] for one in chosen] == [
            *("cancelled",) * 3,
            "running",
            "failed",
        ]
        chosen[3].refresh_from_db()
        assert chosen[3].cancel_requested_at is not None

    def test_retry_queues_and_names_what_it_refuses(self) -> None:
        client = superuser()
        chosen = [
            failed(job_id="good"),
            saved(job_id="waiting"),
            failed(job_id="used-up", attempt_count=3),
            saved(job_id="done", status="succeeded", finished_at=NOW),
        ]
        told = messages(confirm(client, "retry", chosen, extra_attempts="0"))
        assert told[0] == "1 retried, 3 refused."
        assert len(told) == 4
        for name in ("waiting", "used-up", "done"):
            assert any(name in text for text in told[1:])
        assert statuses() == {
            "good": "queued",
            "waiting": "queued",
            "used-up": "failed",
            "done": "succeeded",
        }
        assert OperatorAction.objects.get().detail == "tests.rows good: retried"

    def test_retry_may_grant_attempts(self) -> None:
        one = failed(attempt_count=3)
        told = messages(confirm(superuser(), "retry", [one], extra_attempts="2"))
        assert told == ["1 retried."]
        one.refresh_from_db()
        assert (one.status, one.granted_attempts) == ("queued", 2)

    @pytest.mark.parametrize("extra", ["", "-1", "11", "many", "1.5"])
    def test_a_wrong_number_of_attempts_asks_again(self, extra: str) -> None:
        one = failed()
        client = superuser()
        page = confirm(client, "retry", [one], extra_attempts=extra)
        assert page.status_code == 200 and "errorlist" in page.content.decode()
        assert statuses() == {one.job_id: "failed"}
        client.post(list_url(), hidden_fields(page) | {"extra_attempts": "1"})
        assert statuses() == {one.job_id: "queued"}

    def test_release_lets_blocked_jobs_wait_again(self) -> None:
        chosen = [blocked(job_id="b", run_at=LONG_AGO), saved(job_id="q")]
        told = messages(confirm(superuser(), "release", chosen))
        assert told[0] == "1 released, 1 refused."
        assert "cannot release job q" in told[1]
        assert statuses() == {"b": "queued", "q": "queued"}

    def test_a_job_whose_key_is_held_is_refused_alone(self) -> None:
        saved(job_id="holder", dedupe_key="k")
        chosen = [
            failed(job_id="first"),
            failed(job_id="keyless", dedupe_key="k"),
            failed(job_id="last"),
        ]
        told = messages(confirm(superuser(), "retry", chosen, extra_attempts="0"))
        assert told[0] == "2 retried, 1 refused."
        assert "held by job holder" in told[1]
        assert statuses()["keyless"] == "failed"

    def test_few_of_many_refusals_are_shown(self) -> None:
        chosen = [saved() for _ in range(15)]
        told = messages(confirm(superuser(), "retry", chosen, extra_attempts="0"))
        assert told[0] == "15 refused."
        assert len(told) == 12 and told[-1] == "5 more were refused."

    def test_a_job_of_a_registered_handler_goes_round(self) -> None:
        with registry.temporary():

            @job("admin.demo")
            def demo(ctx: JobContext) -> None: ...

            one = demo.submit(job_id="o-1")
            client = superuser()
            confirm(client, "request_cancel", [one])
            confirm(client, "retry", [one], extra_attempts="0")
        assert statuses() == {"o-1": "queued"}

    def test_a_job_that_is_pruned_meanwhile_is_told(self) -> None:
        gone, there = failed(job_id="gone"), failed(job_id="there")
        Job.objects.filter(pk=gone.pk).delete()
        report = operate([gone, there], job_actions.RELEASE.move, action="release", operator="o")
        assert report.refused[0] == "tests.rows gone: it is gone."
        assert "cannot release job there" in report.refused[1]


@pytest.mark.django_db
class TestRecords:
    def test_who_did_what_and_when_is_kept(self) -> None:
        client = staff("view_job", "cancel_job")
        chosen = [saved(job_id="q"), running(job_id="r"), failed(job_id="f")]
        confirm(client, "request_cancel", chosen)
        kept = {one.job_key: one for one in OperatorAction.objects.all()}
        assert set(kept) == {chosen[0].pk, chosen[1].pk}
        for one in kept.values():
            assert one.operator == "operator-0" and one.action == "request_cancel"
        assert kept[chosen[0].pk].detail == "tests.rows q: cancelled"
        assert kept[chosen[1].pk].detail == "tests.rows r: requested"
        chosen[0].refresh_from_db()
        # By the clock that the move was judged by, and not before it.
        assert chosen[0].finished_at is not None
        assert kept[chosen[0].pk].happened_at >= chosen[0].finished_at

    def test_django_keeps_its_own_log(self) -> None:
        client = staff("view_job", "retry_job")
        one = failed()
        confirm(client, "retry", [one], extra_attempts="0")
        entry = LogEntry.objects.get()
        assert entry.object_id == str(one.pk)
        assert entry.user.username == "operator-0"
        assert entry.get_change_message() == "Retry: retried"

    def test_the_job_and_the_list_of_actions_show_it(self) -> None:
        client = superuser()
        one = failed(job_id="o-1")
        confirm(client, "retry", [one], extra_attempts="0")
        assert "root: tests.rows o-1: retried" in client.get(job_url(one)).content.decode()

    def test_a_move_that_cannot_be_recorded_is_not_made(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no record")

        monkeypatch.setattr("django_durable_jobs.transitions.operators._record", broken)
        one = failed()
        with pytest.raises(RuntimeError, match="no record"):
            confirm(superuser(), "retry", [one], extra_attempts="0")
        assert statuses() == {one.job_id: "failed"}


@pytest.mark.django_db
class TestOneJob:
    def test_its_page_offers_what_its_status_and_the_user_allow(self) -> None:
        everything = superuser()
        offered = {
            "queued": (saved(), ["request_cancel"]),
            "failed": (failed(), ["retry"]),
            "blocked": (blocked(), ["request_cancel", "release"]),
            "succeeded": (saved(status="succeeded", finished_at=NOW), []),
        }
        for one, names in offered.values():
            page = everything.get(job_url(one)).content.decode()
            for name in NAMES:
                assert (f'name="action" value="{name}"' in page) == (name in names)
            page = staff("view_job").get(job_url(one)).content.decode()
            assert 'name="action"' not in page

    def test_from_its_page_the_way_leads_back_to_it(self) -> None:
        client = superuser()
        one = failed()
        data = {"action": "retry", "_selected_action": one.pk, "from_page": "1"}
        page = client.post(list_url(), data)
        assert f'href="{job_url(one)}"' in page.content.decode()
        answer = client.post(list_url(), hidden_fields(page) | {"extra_attempts": "0"})
        assert answer.url == job_url(one)
        assert statuses() == {one.job_id: "queued"}


def locked(row: Job) -> AbstractContextManager[Held[int]]:
    """Hold the row's lock (on SQLite the write lock) in another connection."""
    return held(lambda: Job.objects.filter(pk=row.pk).update(progress=0))


@pytest.mark.django_db(transaction=True)
class TestLocks:
    def test_a_locked_job_is_named_and_hinders_no_other(
        self, settings: Any, is_postgres: bool
    ) -> None:
        settings.DURABLE_JOBS = {"LOCK_TIMEOUT_SECONDS": 0.2}
        client = superuser()
        busy, free = failed(job_id="busy"), failed(job_id="free")
        page = choose(client, "retry", [busy, free])
        with locked(busy):
            answer = client.post(list_url(), hidden_fields(page) | {"extra_attempts": "0"})
            told = messages(answer)
        assert any("tests.rows busy: " in text and "lock" in text for text in told[1:])
        assert statuses()["busy"] == "failed"
        if is_postgres:
            assert told[0] == "1 retried, 1 refused."
            assert statuses()["free"] == "queued"
        else:
            # One writer: the lock of one row is the lock of all.
            assert told[0] == "2 refused."

    def test_requests_in_a_transaction_still_move_each_job_alone(self, settings: Any) -> None:
        settings.DATABASES["default"]["ATOMIC_REQUESTS"] = True
        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            settings.DURABLE_JOBS = {"LOCK_TIMEOUT_SECONDS": 0.2}
            client = superuser()
            busy = failed(job_id="busy")
            page = choose(client, "retry", [busy])
            with locked(busy):
                answer = client.post(list_url(), hidden_fields(page) | {"extra_attempts": "0"})
                assert messages(answer)[0] == "1 refused."
            assert statuses() == {"busy": "failed"}
            answer = client.post(list_url(), hidden_fields(page) | {"extra_attempts": "0"})
            assert messages(answer)[-1] == "1 retried."
        finally:
            settings.DATABASES["default"]["ATOMIC_REQUESTS"] = False
            connection.settings_dict["ATOMIC_REQUESTS"] = False

    def test_inside_a_callers_transaction_the_moves_join_it(self) -> None:
        client = superuser()
        chosen = [failed(job_id="good"), saved(job_id="bad")]
        with transaction.atomic():
            told = messages(confirm(client, "retry", chosen, extra_attempts="0"))
            assert told[0] == "1 retried, 1 refused."
            transaction.set_rollback(True)
        assert statuses() == {"good": "failed", "bad": "queued"}
        assert not OperatorAction.objects.exists()
