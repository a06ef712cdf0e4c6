"""Jobs under Django's TransactionTestCase: real commits, on SQLite in memory too."""

from datetime import UTC, datetime, timedelta
from unittest import mock

from django.core import mail
from django.db import connection, transaction
from django.test import TransactionTestCase

from django_durable_jobs import ModelId, TransactionActive
from django_durable_jobs.testing import (
    FakeClock,
    assert_staged,
    claim,
    crash_points,
    drain,
    expire_lease,
    refute_staged,
)
from orders.jobs import Catalogue, Confirm, Deposit, confirm, deposit, import_catalogue
from orders.models import Account, Order, Product
from orders.services import place_order


class OrderTests(TransactionTestCase):
    def test_an_order_is_confirmed_and_reminded_of(self):
        with FakeClock(datetime(2026, 3, 1, 9, 0, tzinfo=UTC)) as clock:
            place_order("A-1", "ada@example.com")
            assert_staged(confirm, Confirm(reference="A-1"))
            self.assertEqual([one.status for one in drain()], ["succeeded"])
            clock.advance(timedelta(days=7))
            self.assertEqual([one.status for one in drain()], ["succeeded"])
        self.assertEqual(len(mail.outbox), 1)

    def test_a_refused_order_stages_nothing(self):
        with self.assertRaises(ValueError):
            place_order("A-1", "no address")
        refute_staged()

    def test_nothing_is_drained_inside_a_transaction(self):
        with transaction.atomic(), self.assertRaises(TransactionActive):
            drain()

    def assert_left_in_order(self, leave):
        """What the handler left open goes; the connection and all committed rows stay."""

        def careless(*arguments):
            leave()
            Order.objects.create(reference="half done")

        place_order("A-1", "ada@example.com")
        with mock.patch("orders.jobs.send_mail", careless):
            drain(raises=True)
        self.assertFalse(connection.in_atomic_block)
        self.assertTrue(connection.get_autocommit())
        Order.objects.create(reference="A-2")
        connection.rollback()
        self.assertEqual({one.reference for one in Order.objects.all()}, {"A-1", "A-2"})

    def test_a_handler_that_leaves_a_transaction_open(self):
        self.assert_left_in_order(lambda: transaction.atomic().__enter__())

    def test_a_handler_that_leaves_autocommit_off(self):
        self.assert_left_in_order(lambda: transaction.set_autocommit(False))

    def test_a_late_worker(self):
        account = Account.objects.create(owner="Ada")
        job = deposit.submit(Deposit(account=ModelId(account), cents=500))
        zombie = claim(job)
        expire_lease(job)
        self.assertEqual([one.number for one in drain()], [2])
        self.assertEqual(zombie.run().outcome, "lost")
        account.refresh_from_db()
        self.assertEqual(account.cents, 500)


class CrashTests(TransactionTestCase):
    def test_each_product_is_imported_once_wherever_the_worker_dies(self):
        def stage():
            return import_catalogue.submit(Catalogue(names=["cup", "pot"]))

        def check(job):
            self.assertEqual([one.name for one in Product.objects.order_by("pk")], ["cup", "pot"])

        crash_points(stage, check, reset=Product.objects.all().delete)
