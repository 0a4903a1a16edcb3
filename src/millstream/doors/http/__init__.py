"""The HTTP door. `HttpDoor(host, port, routes)` serves pages; to add a page, add its path to the routes."""

from millstream.doors.http.door import HttpDoor
from millstream.doors.http.request import Request
from millstream.doors.http.response import Response

__all__ = ["HttpDoor", "Request", "Response"]
