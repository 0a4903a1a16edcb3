"""The `queue` discipline: leases, acknowledgements, redelivery, dead letters. Share groups (KIP-932) are queues."""
