"""`python -m serving_node MODEL`: one node process that reads prompts and writes answers."""

from serving_node.process import node_command

main = node_command("both")

if __name__ == "__main__":
    main()
