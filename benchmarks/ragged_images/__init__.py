"""What shared slots are worth where samples have unequal numbers of images."""
