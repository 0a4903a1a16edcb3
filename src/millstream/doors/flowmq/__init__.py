"""The FlowMQ door: topics, pushed messages, ACK and NACK, over the queue engine of the broker."""
