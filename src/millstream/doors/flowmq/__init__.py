"""The FlowMQ door: topics, pushed messages, ACK and NACK, over the broker's queues."""
