"""The HTTP door. `HttpDoor(host, port, routes)` serves pages; a page is added by adding its path to the routes."""

from millstream.doors.http.door import HttpDoor
from millstream.doors.http.response import Response

__all__ = ["HttpDoor", "Response"]
