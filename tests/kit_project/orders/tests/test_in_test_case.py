"""Jobs under Django's TestCase: everything happens inside its transaction."""

from datetime import UTC, datetime, timedelta
from unittest import mock

from django.core import mail
from django.db import IntegrityError, transaction
from django.test import TestCase

from django_durable_jobs import JobCancelled, LeaseLost, ModelId, TransactionActive
from django_durable_jobs.models import Job
from django_durable_jobs.testing import (
    CrashPointFailed,
    FakeClock,
    assert_staged,
    capture_staged,
    claim,
    context,
    crash_points,
    drain,
    expire_lease,
    refute_staged,
    run_attempt,
    run_schedules,
)
from orders.jobs import (
    Catalogue,
    Confirm,
    Deposit,
    confirm,
    deposit,
    deposit_carelessly,
    import_catalogue,
    remind,
)
from orders.models import Account, Order, Product
from orders.services import place_order


class PlaceOrderTests(TestCase):
    def test_an_order_stages_its_confirmation(self):
        place_order("A-1", "ada@example.com")
        assert_staged(confirm, Confirm(reference="A-1"), queue="mails")

    def test_a_refused_order_stages_nothing(self):
        with self.assertRaises(ValueError):
            place_order("A-1", "no address")
        refute_staged(confirm)

    def test_an_order_stages_two_jobs(self):
        place_order("A-1", "ada@example.com")
        with capture_staged() as staged:
            place_order("A-2", "bob@example.com")
        self.assertEqual([job.handler for job in staged], ["orders.confirm", "orders.remind"])
        refute_staged(confirm, Confirm(reference="A-1"), among=staged)

    def test_inside_its_own_transaction_the_test_sees_what_is_staged_by_now(self):
        with transaction.atomic():
            place_order("A-1", "ada@example.com")
            assert_staged(confirm)
            with self.assertRaises(TransactionActive):
                drain()

    def test_no_commit_is_needed(self):
        with self.captureOnCommitCallbacks() as callbacks:
            place_order("A-1", "ada@example.com")
            drain()
        self.assertEqual(callbacks, [])
        self.assertEqual(len(mail.outbox), 1)


class ConfirmTests(TestCase):
    def setUp(self):
        self.clock = self.enterContext(FakeClock(datetime(2026, 3, 1, 9, 0, tzinfo=UTC)))
        place_order("A-1", "ada@example.com")

    def test_a_confirmation_is_mailed(self):
        [attempt] = drain()
        self.assertEqual(attempt.status, "succeeded", attempt.error_summary)
        self.assertEqual([one.to for one in mail.outbox], [["ada@example.com"]])
        self.assertTrue(Order.objects.get().confirmed)

    def test_a_mail_that_fails_is_tried_again_after_a_minute(self):
        with mock.patch("orders.jobs.send_mail", side_effect=ConnectionError):
            self.assertEqual([one.status for one in drain()], ["failed"])
        self.assertEqual(drain(), [])
        self.clock.advance(60)
        self.assertEqual([one.status for one in drain()], ["succeeded"])
        self.assertEqual(len(mail.outbox), 1)

    def test_it_fails_in_the_end(self):
        with mock.patch("orders.jobs.send_mail", side_effect=ConnectionError):
            for wait in (0, 60, 300):
                self.clock.advance(wait)
                drain()
        self.assertEqual(assert_staged(confirm).status, "failed")

    def test_the_error_itself_comes_out_where_asked_for(self):
        with (
            mock.patch("orders.jobs.send_mail", side_effect=ConnectionError("refused")),
            self.assertRaisesMessage(ConnectionError, "refused"),
        ):
            drain(raises=True)

    def test_a_reminder_is_due_a_week_later(self):
        assert_staged(remind, run_at=timedelta(days=7))
        drain()
        self.clock.advance(timedelta(days=7))
        [attempt] = drain()
        self.assertIs(attempt.job.result, True)

    def test_reminders_go_out_on_monday_morning(self):
        run_schedules()  # the first time: the current minute counts as processed
        self.clock.advance(timedelta(days=1))
        [job] = run_schedules()
        self.assertEqual(job.scheduled_for, datetime(2026, 3, 2, 8, 30, tzinfo=UTC))
        run_attempt(job)
        self.assertEqual([one.subject for one in mail.outbox], ["Reminder"])

    def test_one_job_alone(self):
        attempt = run_attempt(Job.objects.get(job_id="confirm-A-1"))
        self.assertEqual((attempt.number, attempt.outcome), (1, "returned"))


class DepositTests(TestCase):
    def setUp(self):
        self.account = Account.objects.create(owner="Ada")
        self.job = deposit.submit(Deposit(account=ModelId(self.account), cents=500))

    def balance(self):
        self.account.refresh_from_db()
        return self.account.cents

    def test_a_worker_that_stalled_deposits_nothing(self):
        zombie = claim(self.job)
        expire_lease(self.job)
        [attempt] = drain()  # recovers the job and runs it again
        self.assertEqual((attempt.number, attempt.status), (2, "succeeded"))
        with self.assertRaises(LeaseLost):
            zombie.run(raises=True)
        self.assertEqual(self.balance(), 500)

    def test_a_cancel_that_comes_while_it_runs(self):
        held = claim(self.job)
        self.job.request_cancel()
        with self.assertRaises(JobCancelled):
            held.run(raises=True)
        self.assertEqual(held.row.status, "cancelled")
        self.assertEqual(self.balance(), 0)


class CrashTests(TestCase):
    def test_a_deposit_is_booked_once_wherever_its_worker_dies(self):
        def stage():
            self.account = Account.objects.create(owner="Ada")
            return deposit.submit(Deposit(account=ModelId(self.account), cents=500))

        def check(job):
            self.account.refresh_from_db()
            self.assertEqual(self.account.cents, 500)

        crash_points(stage, check)

    def test_a_careless_deposit_is_found_out(self):
        def stage():
            self.account = Account.objects.create(owner="Ada")
            return deposit_carelessly.submit(Deposit(account=ModelId(self.account), cents=500))

        def check(job):
            self.account.refresh_from_db()
            self.assertEqual(self.account.cents, 500)

        found_out = r'^after a crash after statement 1 on "default": UPDATE .* 1000 != 500$'
        with self.assertRaisesRegex(CrashPointFailed, found_out):
            crash_points(stage, check)


class ImportTests(TestCase):
    def test_as_the_plain_function_it_goes_on_where_it_was(self):
        ctx = context(attempt=2, checkpoint_value=1)
        import_catalogue(ctx, Catalogue(names=["pen", "ink", "pad"]))
        self.assertEqual(ctx.reported.checkpoints, [2, 3])
        self.assertEqual([one.name for one in Product.objects.all()], ["ink", "pad"])

    def test_the_next_attempt_goes_on_after_the_checkpoint(self):
        job = import_catalogue.submit(Catalogue(names=["pen", "ink", "pad"]))
        create = Product.objects.create
        with mock.patch.object(Product.objects, "create") as patched:
            patched.side_effect = [create(name="pen"), ConnectionError]
            run_attempt(job)
        job.refresh_from_db()
        self.assertEqual((job.status, job.checkpoint), ("scheduled", 1))
        with FakeClock(job.run_at):
            drain(raises=True)
        self.assertEqual([one.name for one in Product.objects.all()], ["pen", "ink", "pad"])


class OtherDatabaseTests(TestCase):
    databases = {"default", "archive"}

    def test_a_handler_leaves_every_database_of_the_test_in_order(self):
        Product.objects.using("archive").create(pk=1, name="of the test")

        def careless(*arguments):
            transaction.atomic(using="archive").__enter__()
            Product.objects.using("archive").create(name="half done")

        place_order("A-1", "ada@example.com")
        with mock.patch("orders.jobs.send_mail", careless):
            drain(raises=True)
        self.assertEqual([one.name for one in Product.objects.using("archive")], ["of the test"])

        def broken(*arguments):
            Product.objects.using("archive").create(pk=1)

        place_order("A-2", "bob@example.com")
        with mock.patch("orders.jobs.send_mail", broken), self.assertRaises(IntegrityError):
            drain(raises=True)
        self.assertEqual([one.name for one in Product.objects.using("archive")], ["of the test"])
