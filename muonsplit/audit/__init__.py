"""What a real run did, weight by weight, from what it leaves behind."""
