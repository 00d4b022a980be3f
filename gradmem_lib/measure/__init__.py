"""What is measured: storages, the bytes they hold, and who holds them."""
