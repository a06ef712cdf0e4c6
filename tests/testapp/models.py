"""Business data that the tests change beside their jobs.

There is no migrations module on purpose: the test runner creates the tables.
"""

from django.db import models


class Business(models.Model):
    name = models.CharField(max_length=100)
    value = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.name
