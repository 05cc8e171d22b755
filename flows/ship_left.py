"""The old place of `flows.to_mlflow.ship_left`, which a stack that is running starts by name; to be removed after 0.2."""

from flows.to_mlflow.ship_left import main

if __name__ == "__main__":
    main()
