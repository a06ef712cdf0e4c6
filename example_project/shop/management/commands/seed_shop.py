from django.core.management.base import BaseCommand

from shop.models import Product

PRODUCTS = [
    ("TEA-01", "Green tea, 100 g", 690),
    ("CUP-02", "Cup, stoneware", 1450),
    ("POT-03", "Teapot, cast iron", 5900),
    ("BOX-04", "Sampler box", 2400),
]


class Command(BaseCommand):
    help = "Put the shop's products into the database, or bring them up to date."

    def handle(self, *args, **options):
        for sku, name, price_cents in PRODUCTS:
            Product.objects.update_or_create(
                sku=sku, defaults={"name": name, "price_cents": price_cents}
            )
        if options["verbosity"]:
            self.stdout.write(f"The shop sells {Product.objects.count()} products.")
