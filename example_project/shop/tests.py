"""The shop's jobs are right wherever their worker dies: `python manage.py test`.

`crash_points()` ends a job before and after each of its statements, recovers it, lets it
finish, and checks what must then hold.
"""

import tempfile
from pathlib import Path

from django.test import TestCase, TransactionTestCase, override_settings
from django_durable_jobs import ModelId
from django_durable_jobs.models import Job
from django_durable_jobs.testing import crash_points

from shop import jobs, services
from shop.models import (
    Account,
    Airport,
    ImportedChunk,
    Order,
    OutboxMessage,
    Payment,
    Product,
    SentMessage,
)

AIRPORTS = """\
icao,iata,name,city,country,lat,lon
LFPG,CDG,Charles de Gaulle,Paris,FR,49.0097,2.5478
EDDB,BER,Berlin Brandenburg,Berlin,DE,52.3514,13.4939
LSZH,ZRH,Zurich,Zurich,CH,47.4647,8.5492
"""


class DepositMixin:
    def test_a_deposit_is_booked_once_wherever_its_worker_dies(self):
        def stage():
            self.account = Account.objects.create(customer="Ada")
            return jobs.deposit.submit(jobs.Deposit(account=ModelId(self.account), cents=500))

        def check(job):
            self.account.refresh_from_db()
            self.assertEqual(self.account.balance_cents, 500)
            self.assertEqual(job.result, {"cents": 500})

        crash_points(stage, check)


class DepositTests(DepositMixin, TestCase):
    pass


class CommittedDepositTests(DepositMixin, TransactionTestCase):
    """The same with real commits, and connections that are gone."""


class ImportTests(TestCase):
    def test_each_row_is_imported_once_wherever_the_worker_dies(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "three.csv").write_text(AIRPORTS)
        self.enterContext(override_settings(SHOP_IMPORT_DIR=folder))

        def stage():
            return jobs.import_airports.submit(
                jobs.ImportAirports(source="three.csv", chunk_rows=2)
            )

        def check(job):
            chunks = ImportedChunk.objects.values_list("first_row", "rows")
            self.assertEqual(list(chunks), [(0, 2), (2, 1)])
            self.assertEqual(Airport.objects.count(), 3)
            self.assertEqual((job.result, job.progress), ({"rows": 3}, 1))

        crash_points(stage, check)


class OrderTests(TestCase):
    def setUp(self):
        self.product = Product.objects.create(sku="TEA-01", name="Tea", price_cents=690)

    def place_order(self):
        return services.place_order(customer="Ada", product=self.product, quantity=2)

    def test_an_order_is_confirmed_once_and_each_message_is_sent(self):
        def stage():
            order = self.place_order()
            return Job.objects.get(job_id=f"confirm-{order.reference}")

        def check(job):
            self.assertEqual(Order.objects.get().confirmations, 1)
            self.assertEqual(SentMessage.objects.count(), 1)

        crash_points(stage, check)

    def test_a_payment_is_booked_once(self):
        def stage():
            message = {"message_id": "m-1", "raw_body": b"{}", "amount_cents": 1380}
            services.receive_payment(order=self.place_order(), **message)
            return Job.objects.get(job_id="book-m-1")

        def check(job):
            self.assertEqual(Payment.objects.get().bookings, 1)
            self.assertIsNotNone(Order.objects.get().paid_at)

        crash_points(stage, check)

    def test_a_message_is_sent_at_least_once_and_known_by_its_id(self):
        """Outside of the database nothing is exactly once: the receiver drops repetitions."""
        sent = []

        def stage():
            self.place_order()
            return Job.objects.get(handler="shop.relay_outbox")

        def check(job):
            message = OutboxMessage.objects.get()
            self.assertIsNotNone(message.sent_at)
            ids = SentMessage.objects.values_list("message_id", flat=True)
            self.assertEqual(set(ids), {message.message_id})
            sent.append(len(ids))

        crash_points(stage, check)
        self.assertEqual(set(sent), {1, 2})
