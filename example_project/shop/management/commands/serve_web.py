"""`runserver` that ends well: what it is answering is answered before it exits.

Django's development server drops open requests when it is stopped. A real
deployment has a server that drains (gunicorn, uvicorn); this keeps `serve.py`
honest without one.
"""

import signal
import threading

from django.contrib.staticfiles.management.commands import runserver

DRAIN_SECONDS = 10


class Command(runserver.Command):
    door = None
    help = "Start the development server; finish open requests on SIGTERM or SIGINT."

    def handle(self, *args, **options):
        options["use_reloader"] = False  # so that the server is in the main thread
        super().handle(*args, **options)

    def get_handler(self, *args, **options):
        self.door = Door(super().get_handler(*args, **options))
        return self.door

    def inner_run(self, *args, **options):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            super().inner_run(*args, **options)
        finally:
            if self.door:
                self.door.close(DRAIN_SECONDS)


class Door:
    """A WSGI application that counts who is inside, and can be closed."""

    def __init__(self, application):
        self.application = application
        self.changed = threading.Condition()
        self.inside = 0
        self.closed = False

    def __call__(self, environ, start_response):
        with self.changed:
            if self.closed:
                start_response("503 Service Unavailable", [])
                return [b""]
            self.inside += 1
        try:
            response = self.application(environ, start_response)
        except BaseException:
            self.leave()
            raise
        return Visit(response, self.leave)

    def leave(self):
        with self.changed:
            self.inside -= 1
            self.changed.notify_all()

    def close(self, seconds):
        """Let nobody in any more, and wait (bounded) until all have left."""
        with self.changed:
            self.closed = True
            self.changed.wait_for(lambda: self.inside == 0, timeout=seconds)


class Visit:
    """A response that says when it has been sent."""

    def __init__(self, response, leave):
        self.response = response
        self.leave = leave

    def __iter__(self):
        return iter(self.response)

    def close(self):
        try:
            if hasattr(self.response, "close"):
                self.response.close()
        finally:
            self.leave()
