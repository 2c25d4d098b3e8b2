"""What a caller of the library gives, turned into records, with one clear error for each mistake."""
