"""The Python API without `async`, for scripts and notebooks: `import millstream.sync`, as `docs/python.md` shows."""

from millstream.client.sync import Event, Exclusive, Job, Millstream, Reading, Sender, Stream, Streams, connect, open

__all__ = ["Event", "Exclusive", "Job", "Millstream", "Reading", "Sender", "Stream", "Streams", "connect", "open"]
