from deltaic.cli import main

main()
