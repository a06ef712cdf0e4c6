"""A stand-in for the mail server or message broker of a real shop."""

from shop.models import SentMessage


def publish(message):
    """Hand a message to the outside world, which no transaction can take back.

    Here the outside is a table, so that you can look at it. Treat this call as
    what it stands for: once it returned, the message is gone.
    """
    SentMessage.objects.create(
        message_id=message.message_id, topic=message.topic, body=message.body
    )
