"""Each effect as often as the pages on it say, wherever the worker dies."""

from unittest import mock

from django.core import mail
from django.test import TestCase

from billing import gateway
from billing.jobs import MonthlyBonus, Transfer, bonus, charge, tell, transfer, warn
from billing.models import Account, Invoice
from django_durable_jobs import ModelId
from django_durable_jobs.models import Job
from django_durable_jobs.testing import crash_points, drain, run_attempt


class TransferTests(TestCase):
    def setUp(self):
        self.ada = Account.objects.create(owner="ada", cents=700)
        self.bob = Account.objects.create(owner="bob")

    def submit(self):
        payload = Transfer(source=ModelId(self.ada), target=ModelId(self.bob), cents=500)
        return transfer.submit(payload)

    def balances(self):
        return list(Account.objects.order_by("owner").values_list("cents", flat=True))

    def test_the_money_moves_once_wherever_its_worker_dies(self):
        def check(job):
            self.assertEqual(self.balances(), [200, 500])
            self.assertEqual(job.result, {"cents": 500})
            # Staged in the same transaction: one job tells, maybe more than once.
            self.assertEqual(Job.objects.filter(handler="billing.tell").count(), 1)

        crash_points(self.submit, check)

    def test_what_is_not_there_is_not_moved(self):
        self.submit()
        broke = self.submit()
        drain()
        broke.refresh_from_db()
        self.assertEqual((broke.status, self.balances()), ("failed", [200, 500]))


class ChargeTests(TestCase):
    def setUp(self):
        gateway.calls.clear()
        self.addCleanup(gateway.charges.clear)

    def test_the_provider_makes_one_charge_of_all_calls(self):
        def stage():
            gateway.charges.clear()
            invoice = Invoice.objects.create(number="I-1", cents=900)
            return charge.submit(ModelId(invoice), job_id=invoice.number)

        def check(job):
            self.assertEqual(gateway.charges, {"/I-1": 900})
            invoice = Invoice.objects.get()
            self.assertEqual((invoice.receipt, invoice.state), (job.result, "paid"))

        points = crash_points(stage, check)
        self.assertGreater(len(gateway.calls), len(points) + 1, "some of them called twice")

    def test_an_invoice_that_cannot_be_charged_is_unpaid(self):
        invoice = Invoice.objects.create(number="I-2", cents=900)
        job = charge.submit(ModelId(invoice), job_id=invoice.number, max_attempts=1)
        with mock.patch("billing.gateway.charge", side_effect=ConnectionError):
            run_attempt(job)
        invoice.refresh_from_db()
        self.assertEqual((invoice.state, invoice.receipt), ("unpaid", ""))


class BonusTests(TestCase):
    def setUp(self):
        self.account = Account.objects.create(owner="ada")
        self.march = MonthlyBonus(account=ModelId(self.account), month="2026-03")

    def test_one_bonus_a_month_wherever_its_worker_dies(self):
        def check(job):
            self.account.refresh_from_db()
            self.assertEqual(self.account.cents, 500)

        crash_points(lambda: bonus.submit(self.march), check)

    def test_one_bonus_a_month_whoever_asks_for_it(self):
        bonus.submit_many([self.march, self.march])
        drain()
        self.account.refresh_from_db()
        self.assertEqual(self.account.cents, 500)


class WarnTests(TestCase):
    def test_a_warning_is_sent_at_most_once(self):
        account = Account.objects.create(owner="ada")
        sent = set()

        def stage():
            mail.outbox.clear()
            return warn.submit(ModelId(account))

        def check(job):
            sent.add((job.status, len(mail.outbox)))

        crash_points(stage, check, ends={"succeeded", "interrupted"})
        self.assertEqual(sent, {("interrupted", 0), ("interrupted", 1), ("succeeded", 1)})

    def test_a_mail_may_come_twice(self):
        account = Account.objects.create(owner="ada")
        sent = set()

        def stage():
            mail.outbox.clear()
            return tell.submit(ModelId(account))

        crash_points(stage, lambda job: sent.add(len(mail.outbox)))
        self.assertEqual(sent, {1, 2})
