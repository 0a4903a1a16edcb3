"""Administration of a broker over the network: what the command line, the web console and Python programs share.

    from millstream.admin.connection import Connection
    from millstream.admin.redrive import Selection, redrive

    report = redrive(Connection("127.0.0.1:9092"), selection=Selection(topic="jobs"))

The operations take a `Connection` and return values. A long one calls `on_progress` with its report so far. All raise
`MillstreamError` with one sentence. They block; nothing here parses arguments or prints.
"""
