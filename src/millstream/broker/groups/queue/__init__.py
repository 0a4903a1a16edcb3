"""The `queue` discipline: leases, answers, redelivery and dead letters. Kafka's share groups are queues."""
