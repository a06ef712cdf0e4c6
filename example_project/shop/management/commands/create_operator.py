import os
import secrets

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    help = (
        "Create the superuser 'operator' for local use and print its password: "
        "SHOP_OPERATOR_PASSWORD if set, else a new one each time."
    )

    def handle(self, *args, **options):
        if not settings.DEBUG:
            raise CommandError("This account is for a local (DEBUG) shop only.")
        password = os.environ.get("SHOP_OPERATOR_PASSWORD") or secrets.token_urlsafe(9)
        operator, _ = get_user_model().objects.get_or_create(
            username="operator", defaults={"is_staff": True, "is_superuser": True}
        )
        if not operator.is_superuser:
            raise CommandError("There is an 'operator' already, who is no superuser.")
        if not operator.check_password(password):
            operator.set_password(password)
            operator.save(update_fields=["password"])
        self.stdout.write(f"Sign in as  operator  with password  {password}")
